"""TraceCollector: takes what an OpenTelemetry exporter sends over gRPC, in this process.

Verb: `spans_of` (a request's, once they have come).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PATIENCE_S = 20.0


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """See the head of this file; `endpoint` is what an exporter is told."""

    def __init__(self) -> None:
        self._spans: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # the service calls it so
        self._spans += [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans_of(self, rid: str, names: Collection[str]) -> list[Any]:
        """The last span of each name in the trace of a request, once all have come; every process sends its own."""
        deadline = time.monotonic() + PATIENCE_S
        found: dict[str, Any] = {}
        while time.monotonic() < deadline:
            spans = list(self._spans)
            traces = {span.trace_id for span in spans if attributes(span).get("rid") == rid}
            found = {span.name: span for span in spans if span.trace_id in traces}
            if found.keys() >= set(names):
                return [found[name] for name in names]
            time.sleep(0.1)
        raise AssertionError(f"of {rid} there are the spans {sorted(found)}")

    def close(self) -> None:
        self._server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    """Those of a span, as Python's values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
