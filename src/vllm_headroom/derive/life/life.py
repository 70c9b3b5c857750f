"""What is exported of the engine's life."""

from __future__ import annotations

from vllm_headroom import catalog
from vllm_headroom.model import Sample, Snapshot
from vllm_headroom.vocabulary import EngineState


def life(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the state the server is in, when this life began and how many there were, and whether it moves."""
    known = snapshot.life
    if known is None:
        return ()
    samples = [Sample(catalog.ENGINE_STATE, (str(state),), float(state is known.state)) for state in EngineState]
    if known.began_seconds is not None:
        samples.append(Sample(catalog.ENGINE_START, (), known.began_seconds))
    samples.append(Sample(catalog.ENGINE_RESTARTS, (), float(known.restarts)))
    samples += [Sample(catalog.ENGINE_EXITS, (str(reason),), float(count)) for reason, count in known.exits]
    if known.progress_age_seconds is not None:
        samples.append(Sample(catalog.ENGINE_PROGRESS_AGE, (), known.progress_age_seconds))
    return (*samples, *(Sample(catalog.ENGINE_KV_STRANDED, labels, ratio) for labels, ratio in known.stranded))
