"""Settings of the OpenAI API over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qlm_core.vocabulary.slo_rules import PRIORITY_MAX, SECONDS_MIN, SLO_S_MAX
from qlm_process.settings import PORT, Count, Seconds, Section

HttpAddress = Annotated[str, Field(pattern=rf"^$|^.+:{PORT}$")]


class HttpSettings(Section):
    """Its limits, and which objectives its tiers stand for."""

    listen: HttpAddress = Field("", description='"host:port" (port 0: any free one). Empty: no HTTP. `qlm up`: 127.0.0.1:8080.')
    admin_listen: HttpAddress = Field(
        "",
        description="Serves the page and `/metrics`, in place of `listen`. Empty: `listen` does where it is loopback, else nothing does.",
    )
    priority_slo_s: float = Field(20.0, ge=SECONDS_MIN, le=SLO_S_MAX, description="Completion SLO of `service_tier: priority`, in seconds.")
    flex_slo_s: float = Field(600.0, ge=SECONDS_MIN, le=SLO_S_MAX, description="Completion SLO of `service_tier: flex`, in seconds.")
    objectives: dict[str, Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]] = Field(
        default_factory=dict,
        description="Priorities of objectives of llm-d by name, higher first: N is a strict priority of -N, 0 none.",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field("ignore", description="Fields of a body that docs/reference/http.md does not name.")
    cancel_on_disconnect: bool = Field(
        False, description="A client that leaves before its answer, unless it is streamed, cancels its request. Default: it goes on."
    )
    choices_max: Count = Field(16, description="Most answers of one call: `n`, times the prompts of a completion.")
    calls_max: Count = Field(20_000, description="Calls in progress; more are refused with 503.")
    body_bytes_max: Count = Field(8 << 20, description="Largest body of a call.")
    body_timeout_s: Seconds = Field(30.0, description="How long a body may take to arrive.")
    header_bytes_max: Count = Field(8190, description="Longest header, and longest request line.")
    keep_alive_s: Seconds = Field(15.0, description="Silence of an event stream after which it gets a comment line.")
