"""TraceCollector: takes what an OpenTelemetry exporter sends over gRPC, in this process.

Verb: `spans_of` (a request's, once they have come).
"""

from __future__ import annotations

import time
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

    def spans_of(self, rid: str) -> dict[str, Any]:
        """Name -> the last span of that name in the trace of a request, once its root has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for root in self._spans:
                if attributes(root).get("rid") == rid and not root.parent_span_id:
                    return {span.name: span for span in self._spans if span.trace_id == root.trace_id}
            time.sleep(0.1)
        raise AssertionError(f"no trace of {rid} has come")

    def close(self) -> None:
        self._server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    """Those of a span, as Python's values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
