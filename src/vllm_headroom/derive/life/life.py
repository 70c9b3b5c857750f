"""What is exported of the engine's life."""

from __future__ import annotations

from vllm_headroom import catalog
from vllm_headroom.derive.readings import states
from vllm_headroom.model import Sample, Snapshot


def life(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the state the server is in, when this life began and how many there were, and whether it moves."""
    known = snapshot.life
    if known is None:
        return ()
    samples = [*states(catalog.ENGINE_STATE, (), known.state)]
    if known.began_seconds is not None:
        samples.append(Sample(catalog.ENGINE_START, (), known.began_seconds))
    samples.append(Sample(catalog.ENGINE_RESTARTS, (), float(known.restarts)))
    samples += [Sample(catalog.ENGINE_EXITS, (str(reason),), float(count)) for reason, count in known.exits]
    if known.progress_age_seconds is not None:
        samples.append(Sample(catalog.ENGINE_PROGRESS_AGE, (), known.progress_age_seconds))
    return (*samples, *(Sample(catalog.ENGINE_KV_STRANDED, labels, ratio) for labels, ratio in known.stranded))
