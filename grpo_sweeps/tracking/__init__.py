"""What a run leaves behind: the local record (always) and its copy in MLflow (when a store can be reached).

    local, journal, columns   the record: metrics, groups, completions, evaluations
    lines                     what a line of metrics.jsonl may hold
    status                    status.json: where a run stands, and whether it still lives
    provenance                which code and which packages made it
    mirror, mlflow_copy       the copy in MLflow, made by another process

Nothing here imports torch, and only `mlflow_copy` imports MLflow, when it opens a store.
"""
