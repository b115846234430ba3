"""When what happens every so many steps is due."""


def due(step: int, every: int) -> bool:
    """At steps 0, every, 2 every, ...; never where `every` is 0."""
    return bool(every) and step % every == 0
