"""The page for operators and its JSON: the cluster now, and the timeline of one request; and the metrics. No prompt and no output is in
them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from qlm.api.v1.gateway_pb2 import (
    ListModelsRequest,
    ListRequestsRequest,
    ListRequestsResponse,
    QueueStatusRequest,
    QueueStatusResponse,
)
from qlm.credentials import Credentials
from qlm_core.vocabulary.errors import Unavailable, invalid_field
from qlm_gateway.front.callers import Caller, Callers
from qlm_gateway.front.http.answers import status_document
from qlm_gateway.front.http.completions import UnaryContext, metadata_of
from qlm_gateway.front.http.page.cluster_document import cluster_document
from qlm_gateway.front.service import GatewayService
from qlm_gateway.front.timeline import timeline_page
from qlm_process.cluster.observer import ClusterObserver, Metadata
from qlm_queue.port import Queue

PAGE_PATH = "/page"
"""Path of the page itself, which holds no data and needs no key: browsers send none with a typed address."""
READ_EVERY_S = 1.0
"""The cluster is read at most so often, however many browsers show it."""
CALL_TIMEOUT_S = 2.0
"""Deadline of a call to the planner, the estimator or an agent: one that does not answer in time is shown as away."""
REQUESTS_SHOWN = 25
"""Requests that have not ended, those accepted first, that are shown one by one."""
EVENT_ID = re.compile(r"\d{1,18}-\d{1,18}", re.ASCII)


class PageRoutes:
    """`name`: of this gateway. `credentials`: for the certificates of calls to planner, estimator and agents; their key is the operator's
    own. `registry`: of this gateway's metrics."""

    def __init__(
        self,
        service: GatewayService,
        queue: Queue,
        callers: Callers,
        registry: CollectorRegistry,
        name: str,
        credentials: Credentials,
        monotonic: Callable[[], float],
    ) -> None:
        self._service = service
        self._queue = queue
        self._callers = callers
        self._registry = registry
        self._monotonic = monotonic
        self._observer = ClusterObserver([name], call_timeout_s=CALL_TIMEOUT_S, credentials=credentials, own_status=self._own_status)
        self._reading = asyncio.Lock()
        self._following = asyncio.Lock()
        self._read: tuple[float, bytes] | None = None
        self._html, self._policy = _page()

    def routes(self) -> Sequence[web.RouteDef]:
        return (
            web.get(PAGE_PATH, self._page),
            web.get(f"{PAGE_PATH}/cluster", self._cluster),
            web.get(f"{PAGE_PATH}/request", self._request),
            web.get("/metrics", self._metrics),
        )

    async def stop(self) -> None:
        """Closes its connections. Safe twice."""
        await self._observer.close()

    async def _page(self, http: web.Request) -> web.StreamResponse:
        headers = {"Content-Security-Policy": self._policy, "Referrer-Policy": "no-referrer", **_NOT_KEPT}
        return web.Response(body=self._html, content_type="text/html", charset="utf-8", headers=headers)

    async def _cluster(self, http: web.Request) -> web.StreamResponse:
        self._operator(http)
        async with self._reading:
            now_s = self._monotonic()
            if self._read is None or now_s - self._read[0] >= READ_EVERY_S:
                self._read = (now_s, await self._poll(_key_of(http)))
            return _answer(self._read[1])

    async def _request(self, http: web.Request) -> web.StreamResponse:
        tenant, request_id, after = (http.query.get(name, "") for name in ("tenant", "id", "after"))
        if after and not EVENT_ID.fullmatch(after):
            raise invalid_field("after", "an entry id, <milliseconds>-<sequence>")
        key = self._operator(http).request_key(tenant, request_id, of_any=True)
        context = UnaryContext(metadata_of(http))
        async with self._following:  # one reader of the event stream at a time
            status = (await self._service.QueueStatus(QueueStatusRequest(tenant=key.tenant, request_id=request_id), context)).request
            page = await timeline_page(self._queue, key, after)
        document = status_document(request_id, status, None)
        document["error"] = status.error.reason.lower() or None  # an engine's message may quote a prompt
        document |= {"tenant": key.tenant, "instance": status.instance, "group_id": status.group_id, "queue_id": status.queue_id}
        document["accepted"] = status.accepted_s
        return _answer(json.dumps({"request": document, "timeline": asdict(page)}).encode())

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        self._operator(http)
        body = await asyncio.to_thread(generate_latest, self._registry)  # some of them are read from the queue by this loop
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _operator(self, http: web.Request) -> Caller:
        """Raises Unauthenticated, PermissionDenied."""
        caller = self._callers.caller(metadata_of(http))
        caller.check_operator()
        return caller

    async def _own_status(self, metadata: Metadata) -> QueueStatusResponse:
        return await self._service.QueueStatus(QueueStatusRequest(), UnaryContext(list(metadata)))

    async def _poll(self, metadata: Metadata) -> bytes:
        """The document of the cluster."""
        context = UnaryContext(list(metadata))
        models = await self._service.ListModels(ListModelsRequest(), context)
        try:
            requests = (await self._service.ListRequests(ListRequestsRequest(limit=REQUESTS_SHOWN), context)).requests
        except Unavailable:
            requests = ListRequestsResponse().requests  # the parts of the view say so
        view = await self._observer.poll(metadata)
        return json.dumps(cluster_document(view, models.models, requests), allow_nan=False).encode()


_NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=_NOT_KEPT)


def _key_of(http: web.Request) -> Metadata:
    """The operator's key as metadata, none without keys."""
    return [(name, str(value)) for name, value in metadata_of(http) if name == "authorization"]


def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets a browser run its own script and style alone, and connect to its gateway alone."""
    html = files("qlm_gateway.front.http.page").joinpath("page.html").read_bytes()
    hashes = {
        name: base64.b64encode(hashlib.sha256(re.findall(rb"<%b>(.*?)</%b>" % (name, name), html, re.DOTALL)[0]).digest()).decode()
        for name in (b"script", b"style")
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes[b'script']}'; style-src 'sha256-{hashes[b'style']}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy
