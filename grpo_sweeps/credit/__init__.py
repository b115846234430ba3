"""The credit of a trained model's tokens: V(s_t) from fresh continuations, and what follows from it.

sampling.py   completions, their prefixes, and the continuations of these (the engine)
shares.py     credit and its squares, less the noise of the values; Var A_t / Var r along the rollout, what uniform
              credit carries, intervals over prompts (numpy, no model)
page.py       tables, figure and page
build.py      the command: a run's checkpoint -> what page.py shows, and the manifest
"""
