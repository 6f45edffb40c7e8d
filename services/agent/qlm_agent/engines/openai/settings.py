"""Settings of the openai engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qlm_process.settings import Count, Seconds, Section

BaseUrl = r"^https?://[^/?#]+(/[^?#]*)?$"

ExtraParameter = Literal["top_k", "min_p", "repetition_penalty", "ignore_eos", "structured_outputs"]
EXTRA_PARAMETERS: tuple[ExtraParameter, ...] = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "structured_outputs")


class OpenAiModelSettings(Section):
    """Where one served model is."""

    remote: str = Field("", max_length=256, description="Its name on its server; empty: QLM's name.")
    base_url: str = Field("", pattern=f"^$|{BaseUrl}", description="Its own server; empty: agent.openai.base_url.")


class OpenAiSettings(Section):
    """A server of OpenAI's completions API."""

    base_url: str = Field("http://127.0.0.1:8000", pattern=BaseUrl, description="The server, without /v1.")
    api_key_env: str = Field("", pattern=r"^[A-Za-z_0-9]*$", description="Environment variable with its API key; empty: none.")
    output: Literal["tokens", "text"] = Field(
        "tokens",
        description="tokens: it takes prompts of token ids and returns ids (vLLM >= 0.10.2). text: it knows only text; its "
        "models have no tokenizer in QLM.",
    )
    parameters: tuple[ExtraParameter, ...] = Field(
        EXTRA_PARAMETERS, description="Sampling parameters beyond OpenAI's that it knows; requests with others are refused."
    )
    models: dict[str, OpenAiModelSettings] = Field(
        {}, description="Where models have another name or server: their names, and for each remote (its name there) or base_url or both."
    )
    continues_chats: bool = Field(
        False, description="output text: its chats can continue a message (continue_final_message, vLLM), so that they are resumed."
    )
    sleep: bool = Field(
        False, description="Whether models that are not active sleep (vLLM --enable-sleep-mode, VLLM_SERVER_DEV_MODE=1, a server each)."
    )
    kv_capacity_tokens: int = Field(0, ge=0, description="Tokens of KV; 0: as /metrics says, else as the profile.")
    connections_max: Count = Field(1024, description="Most runs on a server at once, each with a connection; runs beyond wait for one.")
    tell_every_s: Seconds = Field(0.02, description="How often running requests hand out their tokens.")
    poll_s: Seconds = Field(1.0, description="How often its models and its load are read.")
    connect_timeout_s: Seconds = Field(5.0, description="Longest wait for a connection.")
    call_timeout_s: Seconds = Field(10.0, description="Deadline of a call that generates nothing.")
    first_token_timeout_s: Seconds = Field(600.0, description="Longest wait for the first token, its waiting there included.")
    stall_timeout_s: Seconds = Field(60.0, description="Longest silence between two tokens; then the run counts as broken.")
    swap_timeout_s: Seconds = Field(600.0, description="Deadline of falling asleep and of waking up.")
