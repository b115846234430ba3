"""A supervised control: what of a group's spectrum is due to its being one prompt's.

measure.py    three kinds of R rows from the same problems, their Grams (the engine), and the values of each
page.py       tables and page
__main__.py   the command
"""
