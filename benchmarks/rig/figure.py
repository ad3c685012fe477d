"""The figures that a benchmark reports, each beside the floor of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rig.blocks import Estimate, Series, estimate

__all__ = ["Figure", "compare"]


@dataclass(frozen=True)
class Figure:
    """One row of the JSON; the schema is in ladder.py."""

    part: str
    loop: str
    case: str
    level: str
    verb: str | None
    #: Bytes of one operation.
    bytes: int
    #: Descriptors of one operation.
    descriptors: int
    unit: str
    value: Estimate
    #: CPU nanoseconds of this process for one operation, all threads; None where they mean nothing.
    cpu_ns: float | None
    #: The level that `ratio` compares with; None if this is a floor itself, or has none.
    floor: str | None
    ratio: Estimate | None
    blocks: int
    iterations: int
    #: Further observations, by name.
    extra: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Figure:
        """Return the figure that `as_json` was called on."""
        ratio = Estimate(**data["ratio"]) if data["ratio"] is not None else None
        return cls(**{**data, "value": Estimate(**data["value"]), "ratio": ratio})


def compare(
    series: Sequence[Series],
    *,
    part: str,
    loop: str,
    case: str,
    verb: str | None = None,
    nbytes: int = 0,
    descriptors: int = 1,
    unit: str = "ns",
    floor: int = 0,
    cpu: bool = True,
) -> Iterator[Figure]:
    """Yield the figures of series that were measured in turn, compared block by block with the series number `floor`."""
    base = series[floor]
    for one in series:
        ratios = [mine / theirs for mine, theirs in zip(one.nanoseconds, base.nanoseconds, strict=True) if theirs > 0]
        yield Figure(
            part=part,
            loop=loop,
            case=case,
            level=one.level,
            verb=verb,
            bytes=nbytes,
            descriptors=descriptors,
            unit=unit,
            value=estimate(one.nanoseconds),
            cpu_ns=estimate(one.cpu).median if cpu and one.cpu else None,
            floor=base.level if one is not base else None,
            ratio=estimate(ratios) if one is not base and ratios else None,
            blocks=len(one.nanoseconds),
            iterations=one.iterations,
            extra={},
        )
