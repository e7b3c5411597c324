"""Labels that hold a number for each document."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute
from pydantic import AfterValidator, Field

from stepwell.data.batches import SCHEMA
from stepwell.types import DataError

# Its functions are made at run time, out of sight of type checkers.
pc: Any = pyarrow.compute


def _check_name(name: str) -> str:
    if name in SCHEMA.names:
        raise ValueError(
            f"{name!r} is a column of every document ({', '.join(SCHEMA.names)}), so no label can "
            f"have this name; take another, e.g. {name}_score"
        )
    return name


Label = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_check_name)]


def scores_of(batch: pa.RecordBatch, label: str, kind: str) -> pa.Array:
    """The label as float64, null where a document has none (NaN is none).

    Raises DataError where no step has made such a label.
    """
    if label not in batch.schema.names:
        raise DataError(
            f"{kind} needs the label {label!r}, which no step before it has made (labels here: "
            f"{', '.join(batch.schema.names[len(SCHEMA) :]) or 'none'}); put the step that makes "
            "it (quality-score) before"
        )
    scores = batch[label].cast(pa.float64())
    return pc.if_else(pc.is_nan(scores), pa.scalar(None, pa.float64()), scores)
