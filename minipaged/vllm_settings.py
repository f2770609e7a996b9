"""vLLM's settings under vLLM's names, so that scripts carry over.

A setting that this engine has under another name is translated; None stands for the default. A setting that
it does not have is accepted with values that have no effect, and refused with others, which would be
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from minipaged.config import ConfigError, EngineConfig


def _names(text: str, *values: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(text.split(), values)


HARMLESS: dict[str, tuple[Any, ...]] = {
    **_names(
        """disable_sliding_window enable_expert_parallel enable_lora enable_prompt_embeds
        enable_return_routed_experts enable_sleep_mode enable_trace_replay
        long_prefill_token_threshold_adaptive return_sampling_mask skip_tokenizer_init tokens_only""",
        False,
    ),
    **_names(
        """additional_config chat_template code_revision collect_detailed_traces data_parallel_rank
        device_ids diffusion_config download_dir ec_transfer_config engram_config hf_config_path
        hf_overrides io_processor_plugin kv_events_config kv_offloading_size kv_transfer_config
        logits_processors max_num_active_seqs max_num_queued_reqs max_num_queued_tokens
        max_num_scheduled_tokens model_class_overrides model_loader_extra_config model_weights
        otlp_traces_endpoint override_generation_config pooler_config quantization_config reasoning_config
        reasoning_parser reasoning_parser_plugin rope_scaling rope_theta scheduler_cls tokenizer_revision
        watermark_config weight_transfer_config worker_extension_cls""",
        *(None, {}, [], ""),
    ),
    **_names(
        """cpu_offload_gb long_prefill_token_threshold node_rank num_lookahead_slots offload_group_size
        scheduler_delay_factor""",
        0,
    ),
    **_names(
        """data_parallel_size decode_context_parallel_size max_long_partial_prefills
        max_num_partial_prefills nnodes num_scheduler_steps prefill_context_parallel_size""",
        1,
    ),
    **_names("kv_cache_dtype worker_cls", "auto"),
    **_names("runner task", "auto", "generate"),
    **_names("config_format tokenizer_mode", "auto", "hf"),
    "convert": ("auto", "none"),
    "distributed_executor_backend": ("mp", "uni"),
    "hf_token": (None, True),
    "load_format": ("auto", "hf", "safetensors"),
    "logprobs_mode": ("raw_logprobs",),
    "model_impl": ("auto", "transformers"),
    "prefill_schedule_interval": (0, 1),
    "scheduler_reserve_full_isl": (True,),
    "scheduling_policy": ("fcfs",),
    "watermark": (0.01, 0),  # 0.01 is the manager's, 0 is vLLM's default
}
"""Setting -> the values that have no effect; None is always one."""

IGNORED = _names(
    """aggregate_engine_logging all2all_backend allow_deprecated_quantization allowed_local_media_path
    allowed_media_domains attention_config aux_output_config compilation_config
    cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_params cudagraph_capture_sizes
    cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size default_mm_loras
    disable_async_output_proc disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
    disable_hybrid_kv_cache_manager disable_log_requests disable_nccl_for_dp_synchronization
    distributed_timeout_seconds dp_sync_interval ec_manager_config elastic_ep_max_dp_size
    enable_batch_sharded_sampling enable_cumem_allocator enable_dbo enable_elastic_ep
    enable_ep_weight_filter enable_eplb enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp
    enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details
    enable_mamba_cache_stochastic_rounding enable_mfu_metrics enable_mixed_moe_lora_format
    enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend
    enable_shm_tensor_arena enable_tower_connector_lora eplb_config expert_placement_strategy
    fail_on_environ_validation fault_tolerance_config fully_sharded_loras gdn_prefill_backend
    guided_decoding_backend ignore_patterns interleave_mm_strings ir_op_priority jit_monitor_mode
    jit_monitor_verbose kernel_config kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample
    kv_offloading_backend kv_sharing_fast_prefill language_model_only limit_mm_per_prompt linear_backend
    log_config_file log_level logging_config lora_dtype lora_target_modules mamba_backend mamba_block_size
    mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype master_addr
    master_port max_cpu_loras max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_lora_rank
    max_loras max_parallel_loading_workers max_seq_len_to_capture media_io_kwargs mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
    mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc moe_backend numa_bind numa_bind_cpus
    numa_bind_nodes offload_backend offload_num_in_group offload_params offload_prefetch_step
    optimization_level per_request_spec_decode_metrics performance_mode prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location ray_workers_use_nsight
    renderer_num_workers replayssm_buffer_len safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads served_model_name show_hidden_metrics_for_version shutdown_timeout
    skip_mm_profiling sparse_indexer_topk_backend specialize_active_lora stream_interval
    swa_bounded_replay ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load use_v2_block_manager
    video_pruning_rate"""
)
"""Speed, limits and logs of vLLM's own machinery, or details of what is refused elsewhere."""

AFTER_REASONING = "give StructuredOutputsParams(..., after_reasoning=True)"

IN_SCHEMAS = {
    "disable_any_whitespace": 'give each schema "x-guidance": {"whitespace_pattern": ""}',
    "reasoning_parser": f"drop it, and {AFTER_REASONING}",
}
"""What to do instead of an entry of `structured_outputs_config` that changes texts."""

NO_CHANGE = ("backend", "disable_fallback", "disable_additional_properties")
"""The entries that change none: libraries, and what is so by default."""

RENAMED = {"num_gpu_blocks_override": "num_blocks", "kv_cache_memory_bytes": "kv_cache_memory"}

INSTEAD = {
    "chat_template": "give it to LLM.chat",
    "data_parallel_size": "give 1 (for an HTTP server, see minipaged serve --replicas)",
    "download_dir": "set HF_HOME in the environment instead",
    "hf_token": "set HF_TOKEN in the environment instead",
    "logits_processors": "give functions in SamplingParams",
    "max_num_active_seqs": "give max_num_seqs",
    "reasoning_parser": f"drop it; for structured outputs, {AFTER_REASONING}",
    "override_generation_config": "give the values in SamplingParams",
    "skip_tokenizer_init": "give False, and SamplingParams(detokenize=False)",
    "tokenizer_revision": "give tokenizer one that is loaded",
}
"""What to do, where it is more than leaving a setting out."""

SPECULATION = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
"""Entries of `speculative_config`, and the equivalent settings."""

IGNORED_OF_SPECULATION = _names(
    """attention_backend code_revision disable_by_batch_size disable_eagle_block_drop disable_log_stats
    disable_logprobs disable_mqa_scorer disable_padded_drafter_batch draft_load_config draft_sample_method
    draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification enforce_eager
    index_share_for_mtp_iteration kv_cache_dtype max_model_len moe_backend
    num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max prompt_lookup_min quantization
    rejection_sample_method revision speculative_token_tree suffix_decoding_max_cached_requests
    suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth suffix_decoding_min_token_prob
    tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction"""
)
"""Its entries that change only what is drafted, or how fast."""

NGRAM = ("ngram", "[ngram]")
"""Names of prompt lookup where a model is expected."""

FIX = 'give {"method": "ngram", "num_speculative_tokens": 4}, or a smaller "model" and no method'

DRAFT_LENGTH = 4
"""Tokens drafted at once if a script names a method but no number."""

FIELDS = {option.name for option in fields(EngineConfig)}


def own_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as fields of `EngineConfig`; unknown ones stay, to be refused there.

    Raises:
        ConfigError: a setting of vLLM with a value that would have no effect here.
    """
    own: dict[str, Any] = {}
    for name, value in options.items():
        name = RENAMED.get(name, name)
        if name in HARMLESS:
            # (True is 1 to Python, but not to the person who writes it.)
            if value is not None and not any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in HARMLESS[name]
            ):
                shown = "given" if name == "hf_token" else repr(value)  # (a secret)
                fix = INSTEAD.get(name) or f"give {HARMLESS[name][0]!r}, or drop it"
                raise ConfigError(f"{name} is {shown}, which is not supported; {fix}")
        elif name == "speculative_config" or name in SPECULATION.values():
            pass  # below, together
        elif name == "structured_outputs_config":
            _check_structured_outputs(value)
        elif name == "enforce_eager":
            own |= {"enable_cuda_graphs": False} if value else {}
        elif name == "generation_config" and value == "vllm":
            own[name] = "none"
        elif not (name in IGNORED or (value is None and name in FIELDS)):
            own[name] = value
    return own | _speculation(options)


def _check_structured_outputs(value: Any) -> None:
    for entry, asked in value.items() if isinstance(value, Mapping) else ():
        if asked and entry not in NO_CHANGE:
            fix = IN_SCHEMAS.get(entry, f"drop {entry}")
            raise ConfigError(f"structured_outputs_config is {value!r}, which is not supported; {fix}")


def _speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `speculative_config` and its short forms ask for."""
    spec = options.get("speculative_config")
    if isinstance(spec, str) and spec:
        try:
            spec = json.loads(spec)
        except ValueError as error:
            raise ConfigError(f"speculative_config is {spec!r}, which is not JSON: {error}; {FIX}") from error
    if spec in (None, "", []):
        spec = {}
    if not isinstance(spec, Mapping):
        raise ConfigError(f"speculative_config is {spec!r}; {FIX}")
    for entry, value in spec.items():
        if value is not None and entry not in SPECULATION and entry not in IGNORED_OF_SPECULATION:
            raise ConfigError(f"speculative_config is {spec!r}, which has the unknown entry {entry!r}; {FIX}")
    short = {key: options[name] for key, name in SPECULATION.items() if options.get(name) is not None}
    given = short | {key: value for key, value in spec.items() if value is not None}
    if options.get("speculative_model") in NGRAM:
        given.setdefault("method", "ngram")
    if not given:
        return {}
    method, model, count = map(given.get, SPECULATION)
    if model in NGRAM:
        method, model = "ngram", None
    if (method or "draft_model") != ("ngram" if model is None else "draft_model"):
        raise ConfigError(f"speculative_config is {given!r}, which is not supported; {FIX}")
    if count is None:
        count = options.get("num_speculative_tokens")
    own = {"num_speculative_tokens": DRAFT_LENGTH if count is None else count, "speculative_model": model}
    for name, value in own.items():
        if options.get(name) not in (None, value, *NGRAM):
            raise ConfigError(
                f"{name} is {options[name]!r}, but speculative_config says {value!r}; give one of the two"
            )
    return own
