"""What a run leaves behind: the local record (always) and its copy in MLflow or another place (when it can be reached).

    local, journal   the record: metrics, groups, completions, evaluations
    lines            the lines of metrics.jsonl
    recompute        values that older versions logged, corrected
    status           status.json: where a run stands, and whether it still lives
    provenance       which code and which packages made it
    made_by, digests digests of code, functions, data and weights, and what of them differs
    locks            one writer per run
    tracker          what copies the record to another place, and how a configuration chooses it
    mirror           the process in which a tracker copies while runs go on, and `sync`
    mlflow_*         the tracker of `tracking=mlflow`: passes, one run's copy, the store

Nothing here imports torch, and only `mlflow_store` imports MLflow, when it opens a store.
"""
