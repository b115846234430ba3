"""The figures of a report, each a list of panels."""
