#!/usr/bin/env bash
# A real SLURM of one node for the tests: two CPUs, two made-up GPUs, no accounting. Debian's slurm-wlm and munge, as root.
#
#     tools/slurm_node.sh start [FOLDER]   start it (again: nothing happens), print how to reach it
#     tools/slurm_node.sh env [FOLDER]     print the line that points commands and tests at it: eval "$(... env)"
#     tools/slurm_node.sh stop [FOLDER]    stop what start has started, by its pid files
#
# Key, sockets, state and logs are in FOLDER (default: grpo_sweeps_slurm in the folder for temporary files); nothing of
# the system's own SLURM or munge is touched.
set -euo pipefail

action=${1:-}
folder=${2:-${TMPDIR:-/tmp}/grpo_sweeps_slurm}
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac
host=$(hostname -s)

lives() { [[ -s $1 ]] && kill -0 "$(cat "$1")" 2>/dev/null; } # lives PIDFILE
fail() {
    echo "slurm_node: $*" >&2
    exit 1
}

configure() {
    mkdir -p "$folder"/{state,spool,log}
    chmod 755 "$folder"
    touch "$folder"/gpu{0,1}
    printf 'AutoDetect=off\nNodeName=%s Name=gpu File=%s/gpu[0-1]\n' "$host" "$folder" >"$folder/gres.conf"
    # cred_expire=5 and KillWait=5: a requeued job starts again within seconds instead of two minutes.
    # preempt_send_user_signal and GraceTime: a preempted job hears of it and can checkpoint.
    cat >"$folder/slurm.conf" <<CONF
ClusterName=scratch
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
GresTypes=gpu
KillWait=5
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=5,batch_sched_delay=1
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 RealMemory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo) Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=$host Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=15
PartitionName=high Nodes=$host MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

start_munge() {
    lives "$folder/munged.pid" && return
    rm -f "$folder"/munge.socket*
    [[ -s $folder/munge.key ]] || head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 400 "$folder/munge.key"
    # --force: a folder below /tmp is open to others, which munge would refuse
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/log/munged.log" --seed-file="$folder/munged.seed" 2>>"$folder/log/munged.log"
}

answers() { sinfo -h -o %T 2>/dev/null | grep -Eq 'idle|mixed|allocated|completing'; }

start() {
    local tool
    for tool in munged slurmctld slurmd sinfo; do
        command -v "$tool" >/dev/null || fail "$tool is not installed (Debian: slurm-wlm and munge)"
    done
    [[ $(id -u) == 0 ]] || fail "must be run by root: slurmd starts jobs as other users"
    if ! lives "$folder/slurmctld.pid"; then
        ss -ltn 2>/dev/null | grep -q ':6817 ' && fail "another SLURM controller listens on this machine already (port 6817)"
        rm -rf "${folder:?}/state" "$folder/spool"
        configure
    fi
    start_munge
    export SLURM_CONF=$folder/slurm.conf
    lives "$folder/slurmctld.pid" || slurmctld -c
    lives "$folder/slurmd.pid" || slurmd
    for _ in $(seq 120); do
        answers && break
        sleep 0.25
    done
    answers || fail "the node does not come up within 30 s; see $folder/log"
    echo "SLURM runs; reach it by: export SLURM_CONF=$folder/slurm.conf"
}

stop() {
    local name pid
    for name in slurmd slurmctld munged; do
        lives "$folder/$name.pid" || continue
        pid=$(cat "$folder/$name.pid")
        kill "$pid"
        for _ in $(seq 80); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.25
        done
    done
}

case $action in
start) start ;;
env) [[ -s $folder/slurm.conf ]] || fail "no node in $folder: start it first"
    echo "export SLURM_CONF=$folder/slurm.conf" ;;
stop) stop ;;
*) fail "start, stop or env is expected, and then a folder if another than $folder is meant" ;;
esac
