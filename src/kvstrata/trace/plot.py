"""Draw miss rates against the size of the hot rows, one panel a trace, from result files."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from kvstrata.errors import ConfigurationError, UnsupportedError
from kvstrata.trace.replay import OPTIMUM

# trace -> policy -> [(size in multiples of top-k, miss rate)], ascending by size
Curves = dict[str, dict[str, list[tuple[float, float]]]]


def read_curves(result: Path) -> Curves:
    """Collect the keys `misses.<trace>.<policy>.<size>x` of a result file.

    Raises ConfigurationError if there is none: the file is not from `trace replay` or `bench residency`.
    """
    try:
        content = json.loads(result.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{result}: no JSON ({error})") from error
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for key, rate in content.items() if isinstance(content, dict) else ():
        if key.startswith("misses."):
            _, trace, policy, size = key.split(".", 3)
            curves[trace][policy].append((float(size.removesuffix("x")), float(rate)))
    if not curves:
        raise ConfigurationError(
            f"{result}: no miss rates in it; give the JSON of `kvstrata trace replay` "
            "or of `kvstrata bench residency`"
        )
    return {
        trace: {policy: sorted(points) for policy, points in policies.items()}
        for trace, policies in curves.items()
    }


def draw(curves: Curves, out: Path) -> None:
    """Write an SVG; the same curves give the same bytes. UnsupportedError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "drawing needs matplotlib: install kvstrata with its extra `plot`, pip install 'kvstrata[plot]'"
        ) from error
    sizes = sorted(
        {size for policies in curves.values() for points in policies.values() for size, _ in points}
    )
    figure = Figure(figsize=(4.2 * len(curves), 3.4), layout="constrained")
    for axes, (trace, policies) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for policy, points in policies.items():
            floor = policy == OPTIMUM
            axes.plot(
                [size for size, _ in points],
                [100 * rate for _, rate in points],
                "k--" if floor else "o-",
                label=f"{policy} (knows the future)" if floor else policy,
            )
        axes.set_title(trace)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.set_xlabel("hot rows, in multiples of top-k")
        axes.set_ylabel("selected rows that miss, %")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    # Text as text and fixed ids: a small file that changes only where the figures do.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvstrata"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
