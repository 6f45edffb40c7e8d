"""Settings of files and batches."""

from __future__ import annotations

from pydantic import Field

from qlm_process.settings import Count, Section


class BatchSettings(Section):
    """Where files lie, and their bounds."""

    folder: str = Field(
        "", description="A folder that all gateways of the queue share, or s3://BUCKET/PREFIX. Empty: no files and no batches."
    )
    file_bytes_max: Count = Field(200 << 20, description="Largest file.")
    lines_max: Count = Field(50_000, description="Most requests of a batch.")
    tenant_bytes_max: Count = Field(4 << 30, description="Bytes of all files of a tenant.")
    tenant_files_max: Count = Field(1_000, description="Most files of a tenant, and most batches.")
    in_flight_max: Count = Field(512, description="Most requests of all batches that are in the queue at once.")
