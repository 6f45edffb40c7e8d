"""The command `qlm submit`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

import qlm
from qlm.async_client import RequestOptions
from qlm_cli.console import plain_console
from qlm_cli.options import address_option, credentials, tenant_option
from qlm_core.vocabulary.errors import QlmError, RequestEnded
from qlm_process.tracing import configure_tracing

EXIT_NOT_COMPLETED = 3
OUTLOOK_EVERY_S = 10.0
"""How often the state of a waiting request is printed, beside a streamed answer."""
PROMPT_BYTES_MAX = 64 << 20
"""Most that is read from standard input; gateways have a lower limit of their own."""


@click.command()
@click.argument("prompt", required=False)
@click.option("--model", "-m", envvar="QLM_MODEL", required=True, metavar="NAME", help="Which model; `qlm status` lists them.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="Print the answer as it comes, or whole at its end.")
@click.option("--no-wait", is_flag=True, help="Return once the request is durable; print its id, queue position and expected wait.")
@click.option("--slo", "slo_s", type=float, metavar="SECONDS", help="Objective: seconds from acceptance to the last token.")
@click.option(
    "--first-token-slo", "first_token_s", type=float, metavar="SECONDS", help="Objective: seconds from acceptance to the first token."
)
@click.option("--priority", type=int, metavar="N", help="Instead of an objective: strict priority, lower first (-1000 to 1000).")
@click.option("--max-tokens", type=int, default=0, metavar="TOKENS", help="Most output tokens. Default: what the model's context holds.")
@click.option(
    "--expected-output",
    "expected_output_tokens",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    metavar="TOKENS",
    help="A hint: how long the answer will be. Followed as far as the tenant's hints proved right. Default: none.",
)
@click.option("--temperature", type=float, metavar="T", help="0 is greedy; 0 to 2. Default: the model's.")
@click.option("--expire-after", "expire_after_s", type=float, metavar="SECONDS", help="End the request unanswered after so many seconds.")
@click.option("--request-id", metavar="ID", help="Idempotency key: the same id again is the same request. Default: a new one.")
@click.option("--application", default="", metavar="NAME", help="Label of the calling application.")
@tenant_option
@address_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
def submit(
    prompt: str | None,
    model: str,
    stream: bool,
    no_wait: bool,
    slo_s: float | None,
    first_token_s: float | None,
    priority: int | None,
    max_tokens: int,
    expected_output_tokens: int,
    temperature: float | None,
    expire_after_s: float | None,
    request_id: str | None,
    application: str,
    tenant: str,
    addresses: tuple[str, ...],
    as_json: bool,
) -> None:
    """Send PROMPT (standard input without it) and print the answer.

    Goes on at another of the gateways given if one is gone. Breaking off does not cancel the request.

    Exit codes: 0 completed (accepted, with --no-wait), 1 refused or failed to be asked, 2 wrong use, 3 ended FAILED, CANCELLED or EXPIRED.
    """
    prompt = prompt if prompt is not None else _read_prompt()
    options: RequestOptions = {
        "slo": _slo(slo_s, first_token_s, priority),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "request_id": request_id,
        "expire_after_s": expire_after_s,
        "expected_output_tokens": expected_output_tokens,
    }
    provider = configure_tracing("submit", tenant or "default")
    try:
        with qlm.Client(
            list(addresses), tenant=tenant, application=application, tracer_provider=provider, credentials=credentials()
        ) as client:
            if no_wait:
                _accept(client.submit(model, prompt, **options), as_json)
            else:
                _answer(client, model, prompt, options, stream=stream and not as_json, as_json=as_json)
    finally:
        provider.shutdown()


def _accept(accepted: qlm.Accepted, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(accepted)))
        return
    click.echo(accepted.request_id)
    text = f"{accepted.state}, {accepted.prompt_tokens} prompt tokens, {outlook(accepted)}"
    plain_console(stderr=True, soft_wrap=True).print(text, highlight=False)


def _answer(client: qlm.Client, model: str, prompt: str, options: RequestOptions, *, stream: bool, as_json: bool) -> None:
    notes = plain_console(stderr=True, soft_wrap=True)
    text: list[str] = []

    def report(waiting: qlm.Outlook) -> None:
        within_line = "\n" if text else ""  # one that was evicted waits again
        notes.print(f"{within_line}{waiting.state}: {outlook(waiting)}", style="dim", highlight=False)

    tokens = client.generate(model, prompt, outlook_every_s=OUTLOOK_EVERY_S if stream else 0.0, on_outlook=report, **options)
    ended: QlmError | None = None
    try:
        if stream:
            notes.print(f"accepted: {outlook(tokens.wait_accepted())}", style="dim", highlight=False)
        for chunk in tokens:
            text.append(chunk.text)
            if stream:
                click.echo(chunk.text, nl=False)
                sys.stdout.flush()
    except RequestEnded as error:
        ended = error
    result = tokens.result
    if as_json:
        click.echo(json.dumps({"text": "".join(text), "result": asdict(result) if result else None}))
    else:
        click.echo("" if stream else "".join(text))
        if result is not None:
            notes.print(_summary(result), style="dim", highlight=False)
    if ended is not None:
        click.echo(f"Error: {ended.message} [{ended.reason}]", err=True)
        sys.exit(EXIT_NOT_COMPLETED)


def _summary(result: qlm.Result) -> str:
    timing = result.timing
    waited = f", waited {timing.started_s - timing.accepted_s:.1f} s" if timing.started_s else ""
    return (
        f"{result.request_id}: {result.state}, {result.prompt_tokens} + {result.output_tokens} tokens{waited}, "
        f"{timing.finished_s - timing.accepted_s:.1f} s in all, {result.attempts} attempt{'s' if result.attempts != 1 else ''}"
    )


def outlook(waiting: qlm.Accepted | qlm.Outlook) -> str:
    """The expected wait and queue position in words."""
    prediction = waiting.prediction
    if waiting.paused:
        return "paused until an operator resumes it"
    if prediction is None:
        return "no prediction yet"
    late = "" if prediction.probability_late is None else f", late with probability {prediction.probability_late:.0%}"
    return (
        f"{prediction.requests_ahead} ahead, starts in {prediction.wait_p50_s:.1f} s (p90 {prediction.wait_p90_s:.1f} s), "
        f"ends in {prediction.completion_p50_s:.1f} s (p90 {prediction.completion_p90_s:.1f} s){late}"
    )


def _slo(slo_s: float | None, first_token_s: float | None, priority: int | None) -> qlm.Slo | None:
    given = [
        qlm.Slo.completion(slo_s) if slo_s is not None else None,
        qlm.Slo.first_token(first_token_s) if first_token_s is not None else None,
        qlm.Slo.priority_of(priority) if priority is not None else None,
    ]
    chosen = [slo for slo in given if slo is not None]
    if len(chosen) > 1:
        raise click.UsageError("give one of --slo, --first-token-slo and --priority")
    return chosen[0] if chosen else None


def _read_prompt() -> str:
    if sys.stdin.isatty():
        raise click.UsageError("give a prompt, or send one to standard input")
    data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    if len(data) > PROMPT_BYTES_MAX:
        raise click.UsageError(f"standard input is longer than {PROMPT_BYTES_MAX:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8: {error}") from error
