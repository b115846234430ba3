"""A sweep's records as frames."""
