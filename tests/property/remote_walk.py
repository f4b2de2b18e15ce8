"""The walk over every world that can be reached, breadth first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from remote_explorer import Explorer
from remote_small_world import World


@dataclass
class Walk:
    """What was seen: how many worlds, and those in which nothing can happen any more."""

    worlds: int
    finals: list[World]


def walk(explorer: Explorer, first: World, *, limit: int) -> Walk:
    """See every world. One that breaks a rule, or leads to no end, is an error that tells the way to it."""
    numbers = {first: 0}
    came_from: list[tuple[World, str] | None] = [None]
    before: list[list[int]] = [[]]
    finals: list[World] = []
    queue = deque([first])
    while queue:
        world = queue.popleft()
        is_final = True
        try:
            for how, after in explorer.moves(world):
                is_final = False
                if after not in numbers:
                    numbers[after] = len(numbers)
                    came_from.append((world, how))
                    before.append([])
                    queue.append(after)
                before[numbers[after]].append(numbers[world])
            if is_final:
                finals.append(world)
                explorer.check_final(world)
        except AssertionError as error:
            way = way_to(world, numbers, came_from)
            raise AssertionError(f"{error!r}\nafter: {way}") from error
        assert len(numbers) <= limit, f"more than {limit} worlds"
    ending = reaching([numbers[world] for world in finals], before)
    for world, number in numbers.items():
        if number not in ending:
            raise AssertionError(f"nothing leads to an end\nafter: {way_to(world, numbers, came_from)}")
    return Walk(len(numbers), finals)


def way_to(world: World, numbers: dict[World, int], came_from: list[tuple[World, str] | None]) -> str:
    """How a world comes about, by one of the shortest ways."""
    steps: list[str] = []
    while (step := came_from[numbers[world]]) is not None:
        world, how = step
        steps.append(how)
    return " / ".join(reversed(steps))


def reaching(ends: list[int], before: list[list[int]]) -> set[int]:
    """Everything from which one of the ends can be reached."""
    reached = set(ends)
    queue = list(ends)
    while queue:
        for number in before[queue.pop()]:
            if number not in reached:
                reached.add(number)
                queue.append(number)
    return reached
