"""The report: what a sweep's records say. It reads the local record only, without torch or MLflow.

Its rooms, each of which may import those above it:

measure/   one group's numbers: spectra, nulls, inner products, parts of the model, sub-groups of a pool
read/      a sweep's records as frames, with a cache of what was measured
tables/    means over groups and runs with their intervals: the CSV files
claims/    the rules, and the verdict on each claim
design/    the best group size, pools of a fixed policy, how many prompts an interval takes
figures/   what is drawn of them

remarks.py, page.py and build.py put them together.
"""
