"""The report: query -> table -> figures -> claims -> page. Reads the local record only, without torch or MLflow."""
