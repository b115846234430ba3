"""The credit of a trained model's tokens: V(s_t) from fresh continuations, and what follows from it.

values.py     values of prefixes -> credit and its squares, less the noise of the values (numpy, no model)
shares.py     Var A_t / Var r along the rollout, what uniform credit carries, intervals over prompts
sampling.py   completions, their prefixes, and the continuations of these (the engine)
build.py      the command: a run's checkpoint -> tables, figure, page, manifest
"""
