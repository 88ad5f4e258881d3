"""What the papers report on the axes of the serving benchmark, for tables of theirs beside ours.

- Only numbers that a paper's text states; the figures themselves were not at hand. Where only the picture could tell,
  the entry says "not stated in the text".
- `derived:` is arithmetic on stated numbers; `disagrees:` marks places where one text says two things.
- `OUR_AXES` are the measures of ours that stand on the same axes, by the constants above it.
"""

from __future__ import annotations

from dataclasses import dataclass

CACHEBLEND = "CacheBlend"
CACHE_CRAFT = "Cache-Craft"
FUSIONRAG = "FusionRAG"
CACHECLIP = "CacheClip"
A3 = "A3"

TTFT_BY_RATIO = "ttft by ratio with quality"
TTFT_BY_RATE = "ttft by rate"
SPEEDUP_AT_LOAD = "throughput and latency speed-up at load"
THROUGHPUT_BY_RATE = "throughput by rate"
ATTENTION_BY_RATIO = "attention operator by ratio"  # ours: benchmark/results/kernel/sparse_extend.md
OUR_AXES = (TTFT_BY_RATIO, TTFT_BY_RATE, SPEEDUP_AT_LOAD, THROUGHPUT_BY_RATE, ATTENTION_BY_RATIO)


@dataclass(frozen=True)
class PaperFigure:
    """One figure or table of a paper: its axes, how it was measured, what the text says, and which of our axes it has.

    `setup` names what differs from our run on two CPU cores with a random model of 12 layers.
    """

    paper: str
    figure: str
    axes: str
    setup: str
    stated: tuple[str, ...]
    our_axis: str


# One per paper: every figure of a paper shares machine, engine and models.
_CACHEBLEND_SETUP = (
    "trained Mistral-7B (1 GPU), Yi-34B in 8 bits (1 GPU), Llama-70B in 8 bits (2 GPUs) on NVIDIA A40, 128 GB RAM, "
    "1 TB NVMe SSD measured at 4.8 GB/s; inside vLLM, KV of a layer loaded while the layer "
    "before it computes, one storage level at a time"
)
_CACHE_CRAFT_SETUP = (
    "trained LLaMA-3-8B (TP 1) and 70B (TP 4) on A100 80 GB of an EC2 p4de.24xlarge with 8 of them, 1152 GB RAM, 8 TB "
    "NVMe SSD read at 16 GB/s, PCIe 4.0 x16 given as 64 GB/s; wrapper around vLLM with xFormers and "
    "Triton; caches in GPU, host and SSD, the busiest on the GPU"
)
_FUSIONRAG_SETUP = (
    "trained Mistral-7B-v0.3, Qwen2.5-7B, Qwen2.5-14B (their GPUs: not stated in the text), Qwen3-32B and GLM4-32B "
    "(TP 4) on 4 NVIDIA L20 48 GB, 1 TB DRAM, 7 TB NVMe SSD; built on Hugging Face transformers with "
    "an engine that batches continuously"
)
_CACHECLIP_SETUP = (
    "trained Qwen2.5-14B on a single NVIDIA L20; the auxiliary SmolLM2-135M on the host's CPU, named 6554S"
)
_A3_SETUP = "trained LLaMA3-8B-Instruct in FP16 on NVIDIA 3090, Hugging Face transformers with FlashInfer"

_CACHEBLEND_FIGURES = (
    PaperFigure(
        paper=CACHEBLEND,
        figure="figure 12 (section 7.2)",
        axes="mean TTFT against mean F1 or Rouge-L, one point per method, for three models and four datasets",
        setup=(
            f"{_CACHEBLEND_SETUP}; 6 retrieved chunks of 512 tokens, SAMSum's own chunks of 200-400 tokens; "
            "derived: about 3,072 tokens and the question; device of the KV, batch size and share of chunks "
            "found: not stated in the text for this figure (figure 17 varies the device)"
        ),
        stated=(
            "TTFT 2.2-3.3x lower than full recompute, over 3 models and 4 datasets",
            "F1 and Rouge-L within 0.02 of full recompute and of prefix caching",
            "disagrees: the takeaways put that loss at no more than 0.01-0.03",
            "F1 and Rouge-L 0.15-0.35 above full KV reuse, in many cases more than twice as high",
            "disagrees: the introduction has 0.1-0.2 F1 and 0.03-0.25 Rouge-L above full KV reuse, and the 2.2-3.3x "
            "against prefix caching",
            "slower than full KV reuse in TTFT, by how much: not stated in the text; the introduction "
            "calls the two almost equal",
            "default recompute ratio 15 %, also the least the loading controller allows",
            "test cases: 2WikiMQA 200, Musique 150, SAMSum 200, MultiNews 60",
            "prefix caching as baseline: SGLang's technique, KV in RAM and SSD, loading assumed to take no time",
            "full KV reuse as baseline: PromptCache with a buffer for positions",
            "prefill alone at 4k tokens on one A40: 3 s for a 34B model, 6 s for 70B, as motivation",
            "absolute TTFT in seconds: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=CACHEBLEND,
        figure="figure 14 (section 7.2)",
        axes="TTFT against request rate, per model and dataset",
        setup=(
            f"{_CACHEBLEND_SETUP}; 1,500 queries per dataset and 3 variations of each written by GPT-4: 6,000 "
            "queries, for each the 6 nearest chunks of 512 tokens by L2 distance in random order; the "
            "store begins empty and fills as queries come, least recently used leaves first; "
            "size of the store, arrival process and batching limits: not stated in the text"
        ),
        stated=(
            "2.8-5x the throughput at lower delay than all baselines, across models and datasets",
            "at equal TTFT up to 5x the throughput of full recompute and up to 3.3x that of prefix caching",
            "disagrees: 2.8-5x is against full recompute in the abstract, against prefix caching in the "
            "introduction, against all baselines here",
            "warm-up: the first 1,000 of the 6,000 queries are left out",
            "datasets: Musique extended and 2WikiMQA extended",
            "only baselines of similar quality are shown: full recompute and prefix caching",
            "prefix caching suffers from keeping one chunk once per prefix within the same storage",
            "request rates, their unit, TTFT at a rate and the rate at which a method saturates: not stated in the "
            "text",
        ),
        our_axis=TTFT_BY_RATE,
    ),
    PaperFigure(
        paper=CACHEBLEND,
        figure="figure 15 (section 7.3)",
        axes="prefill compute time against number of chunks (a), chunk length (b) and batch size (c)",
        setup=f"{_CACHEBLEND_SETUP}; a and b: 2WikiMQA with Mistral-7B; model of c: not stated in the text",
        stated=(
            "a, b: least compute time that keeps the loss in F1 at 0.015 or less",
            "a, b: the factor gained stays about the same over numbers and lengths of chunks",
            "c: prefill weighs more the larger the batch, since decoding time grows more slowly",
            "numbers of chunks, chunk lengths, batch sizes and times: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=CACHEBLEND,
        figure="figure 16 (section 7.3)",
        axes="TTFT against F1 or Rouge-L, one point per recompute ratio, per dataset",
        setup=f"{_CACHEBLEND_SETUP}; Yi-34B on all four datasets; prompts otherwise: not stated in the text",
        stated=(
            "ratios of 5-18 %: loss of at most 0.002 in F1 or Rouge-L against full recompute",
            "the same ratios: TTFT 4.1-6.6x lower than full recompute, 3.4-6.1x lower than prefix caching",
            "disagrees: figure 12 reaches 2.2-3.3x only, this model among its three; why: not stated in the text",
            "15 % taken as the least ratio with a negligible loss; elsewhere 10-20 % is said to be enough "
            ", and less than 15 % typically",
            "TTFT and quality at a single ratio: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=CACHEBLEND,
        figure="figure 17 (section 7.3)",
        axes="TTFT against F1, by storage device",
        setup=(
            f"{_CACHEBLEND_SETUP}; Yi-34B on 2WikiMQA, KV in RAM or on a slower SSD; speed of the slower one: "
            "not stated in the text"
        ),
        stated=(
            "TTFT falls with little loss on either device; no factor stated",
            "the slower the device, the closer to full KV reuse, because loading then dominates",
            "per layer, 7B and 4k tokens: 3 ms to recompute 15 %, 16 ms to load from NVMe SSD",
            "per layer, 70B: 7 ms to recompute 15 %, 4 ms to load from NVMe SSD",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
)

_CACHE_CRAFT_FIGURES = (
    PaperFigure(
        paper=CACHE_CRAFT,
        figure="figure 22 (section 5.3.1)",
        axes="speed-up of throughput and of response latency against load, in queries per minute",
        setup=(
            f"{_CACHE_CRAFT_SETUP}; continuous batching by ORCA, at most 150k tokens in a batch; "
            "production workload Sys-X, 5 chunks of varying length, prompts of 1k-20k tokens, median 3.3k; "
            "arrivals after public traces based on Twitter's and traces of Sys-X"
        ),
        stated=(
            "heavy load: 240 queries a minute for 8B, 120 for 70B",
            "no recomputation, heavy load: throughput up to 1.9x and response latency 3.3x lower for 8B, 2x and "
            "3.3x for 70B",
            "30 % recomputed, heavy load: 1.6x and 2.1x for 8B, 1.6x and 2x for 70B",
            "30 % keeps 90 % of the full ROUGE F1 on average, for 70B at least 90 %",
            "70B at 30 %: latency 2.07x lower at high load, 2.26x at medium load",
            "70B at 30 %, waiting left out: 3.22x at high load, 2.64x at medium",
            "mean wait about 7.15 s at high load, 2.15 s at medium; of which method: not stated in the text",
            "baseline: prefix caching according to abstract and introduction; the section itself names none",
            "warm-up: the first 20 queries of every dataset fill the caches",
            "store: 100 chunks of about 1,000 tokens with 5 variants each, 50 GB for 8B, 150 GB for 70B",
            "derived: 240 and 120 queries a minute are 4 and 2 a second",
            "medium and low load in queries a minute, absolute throughput and latency: not stated in the text",
        ),
        our_axis=SPEEDUP_AT_LOAD,
    ),
    PaperFigure(
        paper=CACHE_CRAFT,
        figure="figure 23a (section 5.4.1)",
        axes="TTFT against prompt length, Cache-Craft and prefix cache",
        setup=(
            f"{_CACHE_CRAFT_SETUP}; LLaMA-3-8B on requests of Sys-X, 600-20,000 tokens, about 5,000 on average; "
            "batch size: not stated in the text"
        ),
        stated=(
            "about 2.5x lower TTFT than prefix cache with 39 % of the tokens recomputed, at 90 % of the full quality ",
            "on average 18 % of a Sys-X prompt matches a prefix exactly; introduction: 8 % of the "
            "requests and 18 % of the prefill tokens",
            "disagrees: 1k-20k tokens with a median of 3.3k in the setup",
            "disagrees: section 5.4 compares at equal ROUGE F1 of 0.85, for which 25 % is recomputed",
            "quality on Sys-X at 20 % recomputed: ROUGE 0.87, against 0.59 of full reuse",
            "TTFT at a prompt length: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=CACHE_CRAFT,
        figure="figure 23b (section 5.4.2)",
        axes="TTFT by model size, Cache-Craft and full recompute",
        setup=f"{_CACHE_CRAFT_SETUP}; batches of 4 prompts of 8,192 tokens",
        stated=(
            "1.6x lower TTFT than full recompute for 8B, 2.3x for 70B",
            "the gain grows with the model, explained by its number of layers",
            "settings of equal quality, ROUGE F1 0.85, 25 % recomputed; whether for both sizes: not stated in the text",
            "LLaMA-3-8B in every panel of figure 23 but this one, by the caption",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=CACHE_CRAFT,
        figure="figures 23c and 23d (section 5.4.2)",
        axes="TTFT against prompt length (c) and against batch size (d), Cache-Craft and baselines",
        setup=(
            f"{_CACHE_CRAFT_SETUP}; LLaMA-3-8B; c: batch of 4; d: batch sizes and prompt length: not stated in the text"
        ),
        stated=(
            "c: 1.7x lower TTFT than full recompute at 16k tokens, ahead of all baselines at every length ",
            "d: TTFT grows more slowly with the batch than for all others; no factor stated",
            "compared at equal ROUGE F1 of 0.85: 25 % recomputed, Lingua2 25 % compression, Prefill-H2O 60 % "
            "recomputed",
            "prefix cache is granted a match of 60 % of the prefill tokens, where production has 18 %",
            "prefill without reuse, 70B on 4 A100 with vLLM: up to 76 s for batches of 8 prompts of 32k tokens ",
            "lengths in c other than 16k, TTFT in seconds: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=CACHE_CRAFT,
        figure="figures 24 and 28 (sections 5.4.1 and 6)",
        axes="24: TTFT, chunks found and tokens computed per request of a trace; 28: TTFT within latency under load",
        setup=(
            f"{_CACHE_CRAFT_SETUP}; 24: LLaMA-3-8B, a trace of Sys-X with 5 chunks per request of uneven size and "
            "its warm-up marked, length of the warm-up: not stated in the text; 28: 70B "
            "on 4 A100, batch size on an axis by what is left of its caption"
        ),
        stated=(
            "24: 99th percentile of TTFT 3x lower than with prefix cache",
            "24: 51 % fewer tokens computed than with prefix cache on average; the abstract has 75 % "
            "less redundant computation than full recompute",
            "24: for many requests all 5 of 5 chunks are found",
            "25: at the end 186 chunks in the store, up to 11 variants of one",
            "28: prefix caching reaches a TTFT of 35 s under heavy load",
            "29: loading 5 chunks takes 0.03 s from host memory, 0.59 s from SSD; a typical wait in the queue is "
            "0.32 s",
            "29: loading while queued leaves 0 s (host) and 0.27 s (SSD); 24 of 32 layers loaded in advance leave "
            "0.12 s for SSD",
            "rate of the trace: not stated in the text",
        ),
        our_axis=TTFT_BY_RATE,
    ),
)

_FUSIONRAG_FIGURES = (
    PaperFigure(
        paper=FUSIONRAG,
        figure="figure 14a (section 5.2.2)",
        axes="TTFT by recompute ratio, split into loading and the rest, per model",
        setup=(
            f"{_FUSIONRAG_SETUP}; one question at a time over 27k tokens of Musique, KV in "
            "host memory; which three models, number and length of chunks: not stated in the text"
        ),
        stated=(
            "0 % recomputed: TTFT 5.22-9.39x lower than full attention, over three models",
            "15 % recomputed: 2.66-3.94x lower",
            "disagrees: abstract and introduction give 2.66-9.39x for up to 15 % as one range",
            "disagrees: 27k tokens is called close to typical; Musique has 17k on average",
            "quality at 15 %: above 80 % normalised F1 in 12 of 20 tests, exact match within 0.03 of full "
            "attention in 14 of 20",
            "quality at 15 %, single hop: at least 80 % on all five models; several hops: 56-100 %",
            "quality: up to 70 % higher normalised F1 than baselines at 15 %; 0 % is full reuse, 100 % "
            "full attention, positions adjusted in all",
            "per layer, Qwen2.5-7B (28 layers) on L20 with 27k tokens: 0.07 s of compute, 0.05 GB of KV",
            "derived: 28 layers of 0.07 s are about 1.96 s",
            "ratios other than 0 and 15 %, seconds and share of loading: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=FUSIONRAG,
        figure="figure 14b (section 5.2.2)",
        axes="time of the attention operator against recompute ratio",
        setup=(
            f"{_FUSIONRAG_SETUP}; context of 32k tokens, Triton kernel given the positions of the rows "
            "instead of a mask; heads, precision, batch and the model: not stated in the text"
        ),
        stated=(
            "15 %: 4.2x faster than FlashAttention, which is causal over all rows and filtered afterwards, hence as "
            "slow at every ratio",
            "15 %: 2.69x faster than SDPA with a custom mask on xFormers",
            "100 %: slightly slower than FlashAttention, for reading the row indices; no factor stated",
            "the introduction has up to about 77 % less time at 15 %; derived: 4.2x is 76 % less, 2.69x is 63 %",
            "FlexAttention at 32k and 15 %: 16 GB and 2 s for creating the mask alone",
            "other ratios and milliseconds: not stated in the text",
        ),
        our_axis=ATTENTION_BY_RATIO,
    ),
    PaperFigure(
        paper=FUSIONRAG,
        figure="figure 15 (section 5.2.3)",
        axes="throughput against request rate, by model",
        setup=(
            f"{_FUSIONRAG_SETUP}; continuous batching, a thread sends the questions of the earlier tests at varying "
            "rates; loading per request, overlapped with other requests; which models, "
            "prompts, storage device and arrival process: not stated in the text"
        ),
        stated=(
            "1.2-4.3x the throughput of the baselines, across models, at 15 % recomputed",
            "CacheBlend at 15 % too, after its open source: SDPA for the chosen rows, no asynchronous loading",
            "baselines of the paper: full attention, full reuse, CacheBlend, Cache-Craft; which of them "
            "are in this figure besides CacheBlend: not stated in the text",
            "quality closer to full attention's, by the caption; no number there",
            "warm-up, number of requests, batch limits, rates and their unit: not stated in the text",
        ),
        our_axis=THROUGHPUT_BY_RATE,
    ),
    PaperFigure(
        paper=FUSIONRAG,
        figure="figure 18 (section 5.3.3)",
        axes="TTFT and quality with components added one after another",
        setup=(
            f"{_FUSIONRAG_SETUP}; batch of 10; quality with Qwen2.5-7B on TriviaQA, model and prompt "
            "length of the times: not stated in the text"
        ),
        stated=(
            "full attention 2.189 s; sparse attention at 15 % takes 73.3 % off, asynchronous loading a further 11 %; "
            "11 % of what: not stated in the text",
            "derived: 73.3 % less is 0.584 s, 3.7x",
            "F1: full reuse 0.722, full attention 0.869; selection by the question alone 0.822, 72 % recovered; with "
            "similar chunks at preparation 99 %",
            "disagrees: derived from the same scores, 0.822 is 68 % of the way, not 72 %",
            "preparation costs 0.218 s per chunk, Qwen2.5-7B in batches of 10",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=FUSIONRAG,
        figure="figure 19 (section 5.4)",
        axes="computation time against prompt length at 0 % and 15 %, KV in host memory (left) or on SSD (right)",
        setup=(f"{_FUSIONRAG_SETUP}; Mistral-7B, 10k to 27k tokens; speed of the SSD: not stated in the text"),
        stated=(
            "host memory, 0 %: at most 1.4 s at every length",
            "host memory, 15 %: TTFT 2.3-3x lower than CacheBlend's",
            "host memory: 2.9-5.4x lower TTFT than full attention; whether at 15 % or over both ratios: not "
            "stated in the text",
            "SSD: CacheBlend at 15 % gains nothing below 17k tokens, FusionRAG does; by how much: not "
            "stated in the text",
            "network storage at 100 MB/s would need 25 of 28 layers loaded beforehand",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
)

_CACHECLIP_FIGURES = (
    PaperFigure(
        paper=CACHECLIP,
        figure="table 1 (section 4.4), quality from table 4",
        axes="prefill time by part at 20 % recomputed, CacheClip and full attention",
        setup=(
            f"{_CACHECLIP_SETUP}; 16k tokens, transformers without extras as baseline; chunks of "
            "1,000 tokens overlapping by 50 in the quality tests, in this table: not stated in the text; "
            "batching and where the KV lies: not stated in the text"
        ),
        stated=(
            "full attention 5.641 s; CacheClip 2.961 s, of which 0.238 s selection, 2.643 s recomputation, 0.070 s "
            "overhead",
            "1.91x; disagrees: 1.92x in abstract and text",
            "derived: the parts add up to 2.951 s, not 2.961 s",
            "derived: recomputing 20 % takes 47 % of a full prefill",
            "RULER at 8k and 20 %: 94.50, full 99.70 (CacheBlend at ratio 1), CacheBlend at 20 % 69.94, APE 75.5 ",
            "up to 94.8 % of full on NIAH (at 20 %) and 85.0 % on LongBench",
            "called provisional by its authors, more to come in the next version",
            "number of runs, other lengths and ratios, throughput, load: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
)

_A3_FIGURES = (
    PaperFigure(
        paper=A3,
        figure="figure 5 (inference performance), quality from table 1",
        axes="TTFT against time per output token, one point per method",
        setup=(
            f"{_A3_SETUP}; 10, 100 and 300 generated tokens; chunks of 512 tokens in all benchmarks; "
            "prompt length, number of GPUs, batch size and where the KV lies: not stated in the text for this figure"
        ),
        stated=(
            "about 2x faster than without reuse, in the abstract 2x lower TTFT",
            "3.3x on 70B is quoted from CacheBlend's paper, not measured",
            "about as fast as CacheBlend, which recomputes as many tokens, namely 15 %",
            "order of TTFT: full reuse and position shift, then LegoLink with 20 tokens at both ends of a chunk, "
            "then A3 and CacheBlend, then no reuse",
            "choosing the tokens takes 0.1 ms on average at 6,000 tokens",
            "eviction after the first token: about 5 ms more TTFT, 25 % less time per output token on MultiQA, 1,024 "
            "tokens kept, about 17 % of the input",
            "derived: that input has about 6,000 tokens",
            "LongBench mean, LLaMA3-8B: no reuse 44.93, A3 43.18, CacheBlend 40.23, position shift 40.31, full "
            "reuse 6.39",
            "TTFT and time per output token of any method: not stated in the text",
        ),
        our_axis=TTFT_BY_RATIO,
    ),
    PaperFigure(
        paper=A3,
        figure="figure 6b (inference performance)",
        axes="throughput against batch size: no reuse, full reuse, A3 with eviction",
        setup=(
            f"{_A3_SETUP}; 2,000 tokens in, 100 out; a batch size, not a rate, is the load; static or "
            "continuous batching and batch sizes: not stated in the text"
        ),
        stated=(
            "throughput gains from eviction grow with the batch; no factor stated",
            "price of eviction: LongBench 36.98 to 36.60 with Mistral, RULER 84.17 to 49.43 with Qwen ",
            "large stores and many requests at once put a strain on the CPU that loads KV",
        ),
        our_axis=SPEEDUP_AT_LOAD,
    ),
)

FIGURES: tuple[PaperFigure, ...] = (
    *_CACHEBLEND_FIGURES,
    *_CACHE_CRAFT_FIGURES,
    *_FUSIONRAG_FIGURES,
    *_CACHECLIP_FIGURES,
    *_A3_FIGURES,
)
