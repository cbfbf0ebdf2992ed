"""All that is measured, in the order of the report."""

from collections.abc import Sequence

from benchmarks import accelerator, growth
from benchmarks.arrays import building, moving, using
from benchmarks.checkpoint import (
    checkpoints,
    comparing,
    first_calls,
    linking,
    local_steps,
    models,
    training_runs,
)
from benchmarks.compiled import rehearsing
from benchmarks.exchange import two_programs
from benchmarks.layout import index_math, resharding
from benchmarks.show import pictures
from benchmarks.trees import (
    hosts,
    loading,
    memory,
    models_in,
    prefetching,
    replicas,
    safetensors_out,
    sources_out,
)
from benchmarks.work import Work

Sections = dict[str, list[Work]]


def sections(only: Sequence[str] = (), quick: bool = False) -> Sections:
    """Return the works of each section.

    Args:
      only: parts of the names of sections or works; without any, all are chosen.
      quick: with small arrays, to see that everything runs.
    """
    works = {
        "Index math": index_math.WORKS,
        "Building arrays": building.WORKS,
        "Loading": [*loading.WORKS, *models_in.works(quick), *prefetching.WORKS],
        "Using arrays": using.WORKS,
        "Memory": memory.WORKS,
        "Many hosts": hosts.WORKS,
        "Replicas": replicas.works(quick),
        "Checkpoints": [
            *first_calls.works(quick),
            *checkpoints.works(quick),
            *models.works(quick),
            *comparing.works(quick),
            *linking.works(quick),
            *training_runs.works(quick),
            *local_steps.works(quick),
        ],
        "Two programs": two_programs.works(quick),
        "Safetensors": safetensors_out.works(quick),
        "Sources": sources_out.works(quick),
        "Pictures": pictures.WORKS,
        "Rehearsing": rehearsing.works(quick),
        "Resharding": [*resharding.WORKS, *moving.works(quick)],
        "Growth": growth.works(quick),
    }
    return _chosen(works, only)


def on_accelerator(only: Sequence[str] = (), quick: bool = False) -> Sections:
    """Return the section of works on an accelerator, with arguments as for ``sections``."""
    return _chosen({"On an accelerator": accelerator.works(quick)}, only)


def _chosen(works: Sections, only: Sequence[str]) -> Sections:
    def is_chosen(name: str) -> bool:
        return not only or any(text.lower() in name.lower() for text in only)

    chosen = {
        section: [work for work in each if is_chosen(f"{section}: {work.name}")]
        for section, each in works.items()
    }
    return {section: each for section, each in chosen.items() if each}
