"""What one seed simulates: topology, sizes, times, and which faults happen when. All drawn from the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from random import Random
from typing import TypeVar

from kvstrata.core.layers import Component

T = TypeVar("T")

_DEADLINES = {"sleeper": (2.5, 4.0)}
"""Of reads, in leases, where a scene needs others than usual."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to processes for `duration_s` (0: for ever).

    It begins at `at_s`, or when the `milestone` ("reads", "messages") was counted `at_count` times.

    Kinds: `crash` of an engine ("p", "d") and its restart, `stop` of a process ("p0", "p-core") or of all
    processes of an engine, `cut` of the network between a prefill rank and its decode rank, `relayout`:
    a crash of prefill after which its pages have another size, so that decode must refuse it.
    """

    kind: str
    target: str
    duration_s: float
    at_s: float = 0.0
    milestone: str = ""
    at_count: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One client's request; `gives_up_s` is when the client aborts, counted from its start."""

    number: int
    tokens: int
    starts_s: float
    gives_up_s: float | None
    decode_hit_blocks: int  # of the prompt, in decode's prefix cache
    prefill_hit_blocks: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """One simulated run. Seconds are virtual."""

    seed: int
    is_calm: bool  # nothing goes wrong, and no wait is too short
    is_fair: bool  # messages suffer for a while and clients leave, but every wait outlasts it
    p_tp: int
    d_tp: int
    shares_main: bool  # decode ranks share one main pool, as with sparse offload
    layers: tuple[tuple[Component, ...], ...]
    block_tokens: int
    requests: tuple[Request, ...]
    prefill_blocks: int
    decode_blocks: int
    chunk_tokens: int
    max_running: int
    lease_s: float
    decode_lease_s: float  # of the two, the longer one counts for both sides
    resend_s: float
    open_wait_s: float
    wait_s: float
    read_deadline_s: float
    read_attempts: int
    readers: int
    layer_s: float  # computing one layer of a step, at the most
    page_s: float  # reading one page, on average
    network_s: float
    drift: float  # relative, at the most
    loss: float  # chances; of the network until `calm_s`
    duplication: float
    lateness: float  # that a copy arrives up to `late_s` later
    late_s: float
    reorders: bool
    calm_s: float
    read_failure: float
    read_stuck: float
    read_slow: float
    preemption: float  # a step
    needs_producer: bool  # reads need the producer's process and the network, as over tcp
    keeps_identity: bool  # a restarted producer has the network identity of its former life
    interrupts: bool  # a prefill rank hears of an abort in the middle of a step
    stops_early: bool  # engines abort the other ranks' transfers when one has failed
    retries: int  # of a request by the proxy; after them decode computes by itself
    retries_prefill: bool  # the proxy repeats a request whose prefill failed; else decode finds out
    faults: tuple[Fault, ...]

    @cached_property
    def planes(self) -> tuple[tuple[int, Component], ...]:
        """Every component of every layer; its index is the plane's number."""
        return tuple((layer, component) for layer, parts in enumerate(self.layers) for component in parts)

    @property
    def last_fault_s(self) -> float:
        """When everything that was to go wrong at a given time has."""
        ends = [fault.at_s + fault.duration_s for fault in self.faults]
        gives_up = [r.starts_s + r.gives_up_s for r in self.requests if r.gives_up_s is not None]
        return max([self.calm_s, *ends, *gives_up])

    @property
    def has_cuts(self) -> bool:
        """Whether messages get lost after `calm_s` too."""
        return any(fault.kind == "cut" for fault in self.faults)

    @property
    def longest_lease_s(self) -> float:
        """Until silence is noticed, on a slow clock, after the last late message."""
        lease_s = max(self.lease_s, self.decode_lease_s)
        return lease_s * (1 + self.drift) + self.late_s + 1.0

    def __str__(self) -> str:
        return "\n".join(f"  {field.name} = {_shown(getattr(self, field.name))}" for field in fields(self))


def draw(seed: int) -> Options:
    """The options of a seed. In one run of five nothing but messages can go wrong, or nothing at all."""
    random = Random(seed)
    profile = random.random()
    calm, fair = profile < 0.1, 0.1 <= profile < 0.2
    patient = calm or fair
    scene = "" if patient else _pick(random, ["sleeper", "phoenix", "echo", *[""] * 6])

    def chance(likely: float, most: float, *, never: bool = patient) -> float:
        """0, or with `likely` something up to `most`."""
        value = random.random() * most
        return value if random.random() < likely and not never else 0.0

    p_tp, d_tp = _pick(random, [(1, 1)] * 5 + [(2, 1)] * 4 + [(2, 2)] * 3 + [(4, 1), (4, 2)])
    both, main, indexer = (Component.MAIN, Component.INDEXER), (Component.MAIN,), (Component.INDEXER,)
    layers = tuple(_pick(random, [both, both, both, main, indexer]) for _ in range(random.randint(1, 3)))
    block_tokens = random.randint(2, 4)
    longest = random.randint(2, 6)
    late_s = random.uniform(1.0, 2.0)
    lease_s = random.uniform(20.0, 30.0) if fair else random.uniform(1.0, 2.0)
    span_s = random.uniform(0.5, 2.5)  # in which requests begin
    aborts = chance(0.5, 0.6, never=calm)
    hits = random.random() < 0.4
    requests = tuple(
        _request(random, number, longest, block_tokens, span_s, aborts, hits)
        for number in range(random.randint(2, 6))
    )
    calm_s = 0.0 if calm else random.uniform(0.5, span_s + 2 * late_s)
    return Options(
        seed=seed,
        is_calm=calm,
        is_fair=fair,
        p_tp=p_tp,
        d_tp=d_tp,
        shares_main=random.random() < 0.5,
        layers=layers,
        block_tokens=block_tokens,
        requests=requests,
        # A sleeper shall find its blocks in use by others.
        prefill_blocks=longest + (1 if scene == "sleeper" else random.randint(0, longest)),
        decode_blocks=longest + random.randint(0, 2 * longest),
        chunk_tokens=random.randint(2, 12),
        max_running=random.randint(1, 3),
        lease_s=lease_s,
        decode_lease_s=lease_s * _pick(random, [0.5, 1.0, 1.0, 1.0, 1.5]),
        resend_s=random.uniform(0.1, 0.3),
        open_wait_s=60.0 if patient else random.uniform(2.0, 4.0),
        wait_s=90.0 if patient else random.uniform(2.0, 6.0),
        read_deadline_s=30.0 if patient else lease_s * random.uniform(*_DEADLINES.get(scene, (0.3, 2.5))),
        read_attempts=random.randint(1, 3),
        readers=random.randint(1, 3),
        layer_s=_pick(random, [0.01, 0.05, 0.2]),
        page_s=_pick(random, [0.001, 0.01, 0.03]),
        network_s=_pick(random, [0.001, 0.01, 0.05]),
        drift=_pick(random, [0.0, 1e-4, 0.02]),
        loss=chance(0.6, 0.4, never=calm),
        duplication=chance(0.6, 0.4, never=calm),
        lateness=chance(0.6, 0.3, never=calm),
        late_s=late_s,
        reorders=random.random() < 0.5 and not calm,
        calm_s=calm_s,
        read_failure=chance(0.4, 0.2),
        read_stuck=chance(0.3, 0.1),
        read_slow=chance(0.6, 0.9),
        preemption=chance(0.3, 0.3),
        needs_producer=random.random() < 0.5,
        keeps_identity=random.random() < 0.5,
        interrupts=random.random() < 0.5,
        stops_early=random.random() < 0.5,
        retries=random.randint(1, 3),
        retries_prefill=random.random() < 0.7,
        faults=() if patient else _faults(random, scene, (p_tp, d_tp), span_s + lease_s, lease_s),
    )


def _request(
    random: Random, number: int, longest: int, block_tokens: int, span_s: float, aborts: float, hits: bool
) -> Request:
    tokens = random.randint(1, longest * block_tokens)
    blocks = -(-tokens // block_tokens)
    return Request(
        number=number,
        tokens=tokens,
        starts_s=random.random() * span_s,
        gives_up_s=random.random() * _pick(random, [0.3, 1.0, 4.0]) if random.random() < aborts else None,
        decode_hit_blocks=random.randint(0, blocks) if hits and random.random() < 0.5 else 0,
        prefill_hit_blocks=random.randint(0, blocks - 1) if hits and random.random() < 0.5 else 0,
    )


def _faults(
    random: Random, scene: str, sizes: tuple[int, int], until_s: float, lease_s: float
) -> tuple[Fault, ...]:
    number = _pick(random, [0, 0, 1, 1, 1, 2, 3])
    found = [_fault(random, *sizes, until_s, lease_s) for _ in range(number)]
    at_count = random.randint(1, 8)
    moment_s = random.uniform(0.01, 0.1)
    if scene == "sleeper":
        # A reader sleeps in the middle of a read, while the blocks go to another request.
        target, duration_s = f"d{random.randrange(sizes[1])}", lease_s * random.uniform(1.2, 2.2)
        found.append(Fault("stop", target, duration_s, milestone="reads", at_count=at_count))
    elif scene == "phoenix":
        # A producer is back before a read of its former life is over.
        found.append(Fault("crash", "p", moment_s, milestone="reads", at_count=at_count))
    elif scene == "echo":
        # A consumer is back while what was said to its former life is still under way.
        found.append(Fault("crash", "d", moment_s, milestone="messages", at_count=at_count))
    return tuple(found)


def _fault(random: Random, p_tp: int, d_tp: int, until_s: float, lease_s: float) -> Fault:
    kind = _pick(random, ["crash"] * 3 + ["stop"] * 5 + ["cut"] * 2 + ["relayout"])
    engine = _pick(random, ["p", "d", "d"])
    length_s = random.uniform(0.1, 1.0) if random.random() < 0.3 else lease_s * random.uniform(1.0, 2.5)
    if kind in ("crash", "relayout"):
        stays_down = kind == "crash" and random.random() < 0.15
        target = engine if kind == "crash" else "p"
        quick_s = random.uniform(0.02, 0.2)
        duration_s = 0.0 if stays_down else _pick(random, [quick_s, length_s])
    elif kind == "stop":
        ranks = p_tp if engine == "p" else d_tp
        members = [f"{engine}-core", engine, *(f"{engine}{rank}" for rank in range(ranks))]
        target, duration_s = _pick(random, members), length_s
    else:
        target, duration_s = f"p{random.randrange(p_tp)}", length_s
    # Half of them happen in the middle of something.
    milestone = _pick(random, ["", "", "reads", "messages"])
    if not milestone:
        return Fault(kind, target, duration_s, at_s=random.random() * until_s)
    at_count = random.randint(1, {"reads": 12, "messages": 60}[milestone])
    return Fault(kind, target, duration_s, milestone=milestone, at_count=at_count)


def _pick(random: Random, choices: Sequence[T]) -> T:
    return choices[int(random.random() * len(choices))]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_shown(one) for one in value)})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value.value if isinstance(value, Component) else str(value)
