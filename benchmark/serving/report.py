"""Markdown of a report: `to_markdown`; `targets` says which targets were met, `headline` is the main table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.paired import LOSS_HEADER, loss_cells
from benchmark.common.results import Spread, markdown_table, run_markdown
from benchmark.serving.systems import REORDER, STOCK, parse_systems

OURS = "epic@0.15"
MIN_RATE, MIN_OVER_REORDER, MIN_LOW_RATE, MIN_KEPT = 3.0, 1.5, 3.5, 0.95

Row = Mapping[str, Any]
_MET = {True: "yes", False: "**no**", None: "not decided"}


def to_markdown(report: Row) -> list[str]:
    """Lines of a document with all parts that were measured."""
    lines = [f"# Serving benchmark, plan {report['plan']}", ""]
    lines.append("One system is asked at a time; the servers of the others are paused meanwhile.")
    if rows := targets(report):
        cells = [(row["what"], row["value"], row["wanted"], _MET[row["met"]]) for row in rows]
        lines += ["", "## Targets", "", *markdown_table(("what", "measured", "wanted", "met"), cells)]
    for part, write in _PARTS.items():
        if part in report:
            title, *body = write(report[part])
            lines += ["", title, "", *run_markdown(report[part]["run"]), *body]
    return lines


def targets(report: Row) -> list[dict[str, Any]]:
    """The targets of `epic@0.15` that were measured; `met` is None if the measurement does not decide."""
    found: list[dict[str, Any]] = []

    def add(what: str, values: Mapping[str, float | None], one: str, other: str, wanted: float) -> None:
        """Adds the ratio of `one`'s value to `other`'s; None counts as 0."""
        if one not in values or other not in values:
            return
        first, second = values[one] or 0.0, values[other] or 0.0
        text, met = (f"{first / second:.3g}x", first >= wanted * second) if second else (f"`{other}`: none", None)
        found.append({"what": what, "value": text, "wanted": f"at least {wanted:g}x", "met": met})

    if "serve" in report and "highest_rate" in report["serve"]:
        part = report["serve"]
        rates, closed = part["highest_rate"], by_system(part["runs"], "closed")
        add("highest rate with p99 of TTFT within the bound, against stock", rates, OURS, STOCK, MIN_RATE)
        add("the same against reordering", rates, OURS, REORDER, MIN_OVER_REORDER)
        through = {name: row["requests_per_s"] for name, row in closed.items()}
        add("closed loop, requests/s, against stock", through, OURS, STOCK, MIN_RATE)
        add("closed loop, requests/s, against reordering", through, OURS, REORDER, MIN_OVER_REORDER)
        # The speed is the inverse, so that a system with a failed request has none.
        low = {name: _speed(points[0]) for name, points in part["points"].items() if points}
        add("p99 of TTFT at the low rate, stock against ours", low, OURS, STOCK, MIN_LOW_RATE)
    found += [_loss(row) for row in report.get("fresh", {}).get("rows", ())]
    if "orders" in report:
        rows = [row for row in report["orders"]["rows"] if row["system"] == OURS]
        if len(rows) > 2:  # the first block fills the store
            through = {"last": rows[-1]["requests_per_s"], "second": rows[1]["requests_per_s"]}
            add("requests/s in the last block of new orders, against the second", through, "last", "second", MIN_KEPT)
    if "trained" in report:
        through = {row["system"]: row["requests_per_s"] for row in report["trained"]["rows"]}
        add("trained model of 1 M parameters, requests/s, against stock", through, OURS, STOCK, MIN_RATE)
    return found


def _loss(row: Row) -> dict[str, Any]:
    """The target of a loss: met or missed only if the whole interval is on one side of it."""
    low, high = row["loss_95_percent_interval"]
    return {
        "what": f"loss of {row['system']} where no chunk is repeated",
        "value": f"{row['loss_percent']:+.1f} % ({low:+.1f} to {high:+.1f})",
        "wanted": f"at most {row['target']:g} %",
        "met": True if high <= row["target"] else False if low > row["target"] else None,
    }


def _speed(row: Row) -> float | None:
    """One over the p99 of the time to first token; None if a request failed."""
    return None if row["num_failed"] or not row["ttft_p99_s"] else 1 / row["ttft_p99_s"]


def headline(report: Row) -> list[str]:
    """Table of the main part: one row per system."""
    part = report["serve"]
    closed, rates = by_system(part["runs"], "closed"), part["highest_rate"]
    stock = closed.get(STOCK, {}).get("requests_per_s")
    header = (
        "system",
        f"requests/s, {part['load']['clients']} clients",
        "against stock",
        "TTFT p50, s",
        "TTFT p99, s",
        f"highest rate with p99 below {part['bound_s']:.1f} s",
        "rows computed",
        "answers",
    )
    cells = [
        (
            f"`{name}`",
            _with_spread(row),
            f"{row['requests_per_s'] / stock:.1f}x" if stock else "",
            _seconds(row["ttft_p50_s"]),
            _seconds(row["ttft_p99_s"]),
            "" if rates.get(name) is None else f"{rates[name]:.2f}/s",
            percent_computed(row),
            _answers(name),
        )
        for name, row in closed.items()
    ]
    return markdown_table(header, cells)


def _serve(part: Row) -> list[str]:
    lines = ["## Under load", "", f"Model: {part['model']}. KV pool of {part['pool_len']} tokens.", *_trace(part)]
    if "replay" in part:
        return [*lines, "", "Recorded arrivals, from empty caches:", "", *_runs_table(part["replay"])]
    load = part["load"]
    lines += ["", *headline({"serve": part}), ""]
    lines += [
        f"Closed loop: {load['clients']} clients, the first {load['warmup']} queries from empty caches (`cold`), then",
        f"{load['closed']} in {load['closed_runs']} runs (`closed`; in brackets the slowest and the fastest). Rates: "
        "Poisson arrivals, the same ones and the same",
        f"prompts for every system; the bound is {load['bound_factor']:g} medians of stock's time to first token at "
        "the low rate. `kept`: the p99 of this run is",
        f"within the bound; a rate counts as too high when {load['tries']} runs break it. Each system is measured from "
        "one flush to the next, its rates after its",
        "closed loop; `slots` is the most that were seen in use, `GFLOP/s` a matrix product just before the run: it "
        "shows a machine that has become slower. Answers are *exact* where they are those of a full prefill of the",
        "prompt as it was retrieved, *exact for its own order* where the passages stand in another order.",
        *(f"The sweep of `{name}` ended for want of prompts." for name in part["ended_early"]),
        "",
        "### Closed loop",
        "",
    ]
    lines += _runs_table([run for run in part["runs"] if run["phase"] in ("cold", "closed")])
    for name, points in part["points"].items():
        lines += ["", f"### `{name}` at rates", "", *_points_table(points)]
    return lines


def _documents(part: Row) -> list[str]:
    return [
        "## Real text, real retriever",
        "",
        f"Model: {part['model']}. {part['num_passages']} passages of this repository's prose; TF-IDF retrieves those",
        "of a question, best first.",
        *_trace(part),
        "",
        *_runs_table(part["runs"]),
    ]


def _crowd(part: Row) -> list[str]:
    return [
        "## A crowd",
        "",
        f"Model: {part['model']}. {part['clients']} clients in a closed loop, behind a warm-up with few; their prompts",
        f"are more than the KV pool of {part['pool_len']} tokens holds. `no room kept`: running requests may evict all",
        'reused chunks (`{"keep_share": 0}`).',
        *_trace(part),
        "",
        *_runs_table(part["rows"]),
    ]


def _fresh(part: Row) -> list[str]:
    header = ("system", "with, s", "stock, s", *LOSS_HEADER)
    cells = [(f"`{row['system']}`", *loss_cells(row)) for row in part["rows"]]
    num = part["rows"][0]["with_s"]["num"]
    return [
        "## No repeated chunk",
        "",
        f"Every chunk is new; {num} pairs of blocks of {part['block_len']} queries, stock and ours in turns; seconds",
        "of a block.",
        "",
        *markdown_table(header, cells),
    ]


def _shared(part: Row) -> list[str]:
    scale = part["scale"]
    header = ("server", "requests/s", "TTFT p50, s", "TTFT p99, s", "cached")
    kinds = dict.fromkeys(run["kind"] for run in part["runs"])
    cells = []
    for kind in kinds:
        runs = [run for run in part["runs"] if run["kind"] == kind and run["pair"]]
        columns = (Spread.of([run[name] for run in runs]) for name in ("requests_per_s", "ttft_p50_s", "ttft_p99_s"))
        cached = sum(run["cached_tokens"] for run in runs) / sum(run["prompt_tokens"] for run in runs)
        cells.append((_SERVERS[kind], *(column.text(3) for column in columns), _percent(cached)))
    return [
        "## SGLang's own benchmark, shared prefixes",
        "",
        f"Model: {part['model']}. `python -m sglang.benchmark.serving --dataset-name generated-shared-prefix`:",
        f"{scale['groups']} groups of {scale['per_group']} prompts, unmarked, which begin with {scale['system_len']}",
        f"tokens of their group and end with {scale['question_len']} of their own; {scale['clients']} clients,",
        f"{scale['pairs']} runs of each server in turns, each from empty caches with other prompts.",
        "",
        *markdown_table(header, cells),
        "",
        *(
            f"A run takes {row['loss_percent']:+.1f} % [{low:+.1f}, {high:+.1f}] longer {_SERVERS[row['kind']]}."
            for row in part["rows"]
            for low, high in [row["loss_95_percent_interval"]]
        ),
    ]


_SERVERS = {"plain": "stock SGLang", "chunk": "with `--chunk-cache`"}


def _trained(part: Row) -> list[str]:
    header = ("system", "right", "requests/s", "TTFT p50, ms", "TTFT p99, ms", "exact", "reused", "recomputed", "rows")
    cells = [
        (
            f"`{row['system']}`",
            f"{100 * row['right']:.1f} %",
            _with_spread(row, digits=1),
            *("" if row[name] is None else f"{1000 * row[name]:.0f}" for name in ("ttft_p50_s", "ttft_p99_s")),
            *_shares(row),
            _rows(row),
        )
        for row in part["rows"]
    ]
    num = part["rows"][0]["num_requests"]
    return [
        "## Quality beside speed: the trained model",
        "",
        f"`{part['model']}`, a million parameters, {num} questions with known answers, 4 clients; right = word by",
        "word, places in the order in which the passages stand that were sent. `reorder` may put what introduces a",
        "person behind what refers to it, which leaves a question without its answer. One standard error is about 2",
        "points. Requests/s: all, and the slowest and fastest third. Prompts are short and the model is tiny, so the",
        "server's own work is most of a request, and speeds say little.",
        *_trace(part),
        "",
        *markdown_table(header, cells),
    ]


def _orders(part: Row) -> list[str]:
    header = (
        "queries",
        "system",
        "requests/s",
        "TTFT p50, s",
        "TTFT p99, s",
        "rows",
        "exact",
        "reused",
        "chunks found",
    )
    cells = [
        (
            f"{row['block'] * row['num_requests'] + 1}-{(row['block'] + 1) * row['num_requests']}",
            f"`{row['system']}`",
            f"{row['requests_per_s']:.2f}",
            _seconds(row["ttft_p50_s"]),
            _seconds(row["ttft_p99_s"]),
            _rows(row),
            _percent(row["exact_share"]),
            _percent(row["reused_share"]),
            "" if row["missed_chunks"] is None else _percent(1 - row["missed_chunks"]),
        )
        for row in part["rows"]
    ]
    return [
        "## Ever new orders",
        "",
        f"Model: {part['model']}. No two prompts have the same chunks in the same order.",
        *_trace(part),
        "",
        *markdown_table(header, cells),
    ]


_LAYOUTS = {0: "As deployed: the whole system prompt in front", 1: "Its last block behind the passages"}


def _pulse(part: Row) -> list[str]:
    scale, load = part["scale"], part["load"]
    systems = dict.fromkeys(row["system"] for row in part["layouts"][0]["rows"])
    lines = [
        "## A real RAG service: RAGPulse",
        "",
        f"Model: {part['model']}. KV pool of {part['pool_len']} tokens. Texts are made from ids, equal ids equal",
        f"texts, with {scale['share']:g} of their length, answers with {scale['output_share']:g}.",
        f"{load['clients']} clients in a closed loop, {load['warmup']} requests from empty caches"
        f"{f' (answers of {short} token)' if (short := scale.get('warmup_output_len')) else ''}, {load['closed']}",
        f"more in {load['closed_runs']} runs, then {scale['num_timed']} at their recorded times, scaled to",
        f"{scale['rate']:g} of what stock reached. Marked are passages"
        f"{', history and results from the web' if scale.get('marks_all') else ''}.",
        "",
        *(f"- {name}: sha256 `{digest}`" for name, digest in part["sha256"].items()),
        "",
        f"Answers: {'; '.join(f'`{name}` {_answers(name)}' for name in systems)}.",
    ]
    for layout in part["layouts"]:
        title = _LAYOUTS.get(layout["behind"], f"Its last {layout['behind']} blocks behind the passages")
        lines += ["", f"### {title}", "", *_trace(layout), "", *_runs_table(layout["rows"])]
    return lines


_PARTS = {
    "pulse": _pulse,
    "serve": _serve,
    "documents": _documents,
    "crowd": _crowd,
    "fresh": _fresh,
    "shared": _shared,
    "trained": _trained,
    "orders": _orders,
}


def _trace(part: Row) -> list[str]:
    trace = part["trace"]
    low, middle, high = trace["chunk_len_p5_p50_p95"]
    least, most = trace["chunks_per_prompt"]
    return [
        f"Trace: {least} to {most} chunks per prompt of {low} / {middle} / {high} {trace['unit']} (5th, 50th, 95th "
        f"percentile), {trace['num_chunks']} different ones; prompts of {trace['mean_prompt_len']} {trace['unit']} on "
        f"average, at most {trace['max_prompt_len']}; {trace['mean_output_len']:g} tokens of output.",
    ]


_COLUMNS = (
    "num",
    "failed",
    "requests/s",
    "out tok/s",
    "TTFT p50",
    "p90",
    "p99",
    "TPOT p50",
    "end to end p50",
    "p99",
    "rows",
    "exact",
    "reused",
    "recomputed",
    "slots, most",
    "GFLOP/s",
)


def _run_cells(row: Row) -> tuple[Any, ...]:
    return (
        row["num_requests"],
        row["num_failed"],
        _with_spread(row, digits=3),
        f"{row['output_tokens_per_s']:.1f}",
        *(_seconds(row[name]) for name in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")),
        _seconds(row["tpot_p50_s"]),
        _seconds(row["e2e_p50_s"]),
        _seconds(row["e2e_p99_s"]),
        _rows(row),
        *_shares(row),
        "" if row["slots_max"] is None else row["slots_max"],
        f"{row['machine_gflops']:.0f}",
    )


def _runs_table(rows: Sequence[Row]) -> list[str]:
    return markdown_table(("run", *_COLUMNS), [(f"`{r['system']}`, {r['phase']}", *_run_cells(r)) for r in rows])


def _points_table(points: Sequence[Row]) -> list[str]:
    cells = []
    for row in sorted(points, key=lambda row: row["rate"]):
        good = "" if row.get("goodput_per_s") is None else f"{row['goodput_per_s']:.3f}"
        cells.append((f"{row['rate']:.3f}/s", "yes" if row["kept"] else "no", good, *_run_cells(row)))
    return markdown_table(("rate", "kept", "goodput/s", *_COLUMNS), cells)


def by_system(runs: Sequence[Row], phase: str) -> dict[str, Row]:
    """The run of each system in a phase."""
    return {run["system"]: run for run in runs if run["phase"] == phase}


def _answers(system: str) -> str:
    return parse_systems([system])[0].exactness


def percent_computed(row: Row) -> str:
    """Share of the prompt tokens that the model computed."""
    return _percent(row["mean_rows"] / row["mean_prompt_len"] if row["mean_prompt_len"] else None)


def _with_spread(row: Row, digits: int = 2) -> str:
    """Requests a second, with the slowest and the fastest run if there were several."""
    runs = row.get("requests_per_s_runs")
    spread = f" ({min(runs):.{digits}f}-{max(runs):.{digits}f})" if runs else ""
    return f"{row['requests_per_s']:.{digits}f}{spread}"


def _rows(row: Row) -> str:
    return f"{row['mean_rows']:.0f} of {row['mean_prompt_len']:.0f}"


def _shares(row: Row) -> list[str]:
    return [_percent(row[f"{kind}_share"]) for kind in ("exact", "reused", "recomputed")]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
