"""The command `qlm health`: the health check of a container, or of a script that waits for a process."""

from __future__ import annotations

import sys

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qlm_cli.options import access_options, credentials

EXIT_NOT_SERVING = 1


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--service", default="", metavar="NAME", help="Full name of one service, such as qlm.api.v1.Gateway. Default: the process.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline.",
)
@access_options
def health(address: str, service: str, timeout_s: float) -> None:
    """Ask the process at HOST:PORT whether it serves (grpc.health.v1), and print what it says.

    A standby serves: it takes over. Exit codes: 0 SERVING, 1 anything else or no answer, 2 wrong use.
    """
    with credentials().channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            click.echo(f"{address}: {error.code().name}")
            sys.exit(EXIT_NOT_SERVING)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    click.echo(f"{address}: {status}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(EXIT_NOT_SERVING)
