# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM that are not in the namespace, each with the reason why it cannot matter.

Everything else in vLLM's configuration is in it, also what a later version adds. A setting belongs
here if KV does not depend on it at all, if another fact of the namespace or the key says what it
does, or if it changes what runs together in a step and nothing else: KV of one prompt differs by
rounding between any two batches, with and without a store.
"""

from __future__ import annotations

_WEIGHTS = "the weights are told by their content"
_TOKENS = "keys hold token ids, however a text became them"
_CONTENT = "its content is in hf_config"
_CONTENT_OF_FILE = "the file's content is in"
_LOOKS = "only rotary and other tables depend on it, and their numbers are in"
_SAMPLING = "it is about what is sampled from the logits"
_BATCH = "it decides what runs together in a step"
_MEMORY = "it decides how much fits into HBM, or how memory is got"
_PLACE = "it names a place, a process or a port"
_START = "it is about how the server starts, loads or warms up"
_SEEN = "it is about logs, metrics and traces"
_LIMIT = "it refuses requests, or limits a cache"
_REPLICA = "an engine of its own computes each request"
_GRAPH = "it decides which steps are replayed as graphs of the same kernels"
_OURS = "it is the store's own, or another connector's"
_DERIVED = "it follows from settings that are in"

SECTIONS: dict[str, str] = {
    "VllmConfig.kv_transfer_config": _OURS,
    "VllmConfig.kv_events_config": _SEEN,
    "VllmConfig.ec_transfer_config": "it moves encoder outputs, as they are",
    "VllmConfig.ec_manager_config": "it keeps encoder outputs, as they are",
    "VllmConfig.instance_id": _PLACE,
    "VllmConfig.observability_config": _SEEN,
    "VllmConfig.logging_config": _SEEN,
    "VllmConfig.profiler_config": _SEEN,
    "VllmConfig.structured_outputs_config": _SAMPLING,
    "VllmConfig.reasoning_config": _SAMPLING,
    "VllmConfig.watermark_config": _SAMPLING,
    "VllmConfig.scheduler_config": _BATCH,
    "VllmConfig.offload_config": "weights are the same wherever they lie",
    "VllmConfig.weight_transfer_config": "replaced weights are seen by reset_cache()",
    "VllmConfig.shutdown_timeout": _START,
    "VllmConfig.speculative_config": "namespace.py takes it in where drafts keep KV",
    "VllmConfig.aux_output_config": "what is returned beside the tokens",
    "VllmConfig.quant_config": "made of quantization, hf_config and files, which are in",
}
"""Whole sections, and settings of the top."""

FIELDS: dict[str, dict[str, str]] = {
    "ModelConfig": {
        _WEIGHTS: "model model_weights revision",
        _TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init",
        _CONTENT: "hf_config_path hf_overrides",
        _LOOKS: "max_model_len spec_target_max_model_len",
        _SAMPLING: "seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
                   "generation_config override_generation_config logits_processors",
        _PLACE: "served_model_name hf_token allowed_local_media_path allowed_media_domains",
        _MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
                 "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
        _DERIVED: "enforce_eager pooler_config",
        _START: "renderer_num_workers io_processor_plugin enable_trace_replay "
                "allow_deprecated_quantization enable_prompt_embeds",
    },
    "CacheConfig": {
        _MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
                 "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes",
        "vLLM's own prefix cache finds KV, and computes none":
            "prefix_match_unit enable_prefix_caching prefix_caching_hash_algo hash_block_size "
            "prefix_cache_retention_interval cache_hit_alignment_tokens",
        _DERIVED: "user_specified_block_size effective_attention_block_size _block_size_resolved",
        _OURS: "kv_offloading_size kv_offloading_backend",
        "each rank says the layout that it has": "kv_cache_layout",
    },
    "ParallelConfig": {
        _REPLICA: "data_parallel_size data_parallel_size_local data_parallel_rank "
                  "data_parallel_rank_local data_parallel_index data_parallel_backend "
                  "data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval "
                  "elastic_ep_max_dp_size enable_elastic_ep disable_nccl_for_dp_synchronization",
        _PLACE: "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port "
                "master_addr master_port node_rank rank world_size placement_group "
                "_data_parallel_master_port_list _coord_store_port _api_process_count "
                "_api_process_rank distributed_executor_backend ray_runtime_env "
                "ray_workers_use_nsight assigned_physical_gpu_ids",
        _START: "max_parallel_loading_workers numa_bind numa_bind_nodes numa_bind_cpus "
                "distributed_timeout_seconds cpu_distributed_timeout_seconds "
                "enable_fault_tolerance fault_tolerance_config enable_shm_tensor_arena "
                "_allow_auto_resolve_cp_interleave_size",
        _BATCH: "dbo_decode_token_threshold dbo_prefill_token_threshold",
        _SAMPLING: "enable_batch_sharded_sampling",
    },
    "DeviceConfig": {"each rank says which kind of device it has": "device"},
    "LoadConfig": {
        _START: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
                "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location device",
    },
    "KernelConfig": {_START: "enable_cutedsl_warmup enable_jit_warmup"},
    "LoRAConfig": {
        "an adapter is told by its content": "max_lora_rank default_mm_loras",
        _BATCH: "max_loras max_cpu_loras specialize_active_lora max_lora_cls_labels",
    },
    "MultiModalConfig": {
        _CONTENT_OF_FILE: "mm_encoder_fp8_scale_path",
        _PLACE: "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        _LIMIT: "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type "
                "mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling",
    },
    "SpeculativeConfig": {
        _WEIGHTS: "model revision",
        "it is in as the model's own": "target_model_config target_parallel_config",
        "KV is kept by the first pass over a step's tokens, and guesses follow it":
            "num_speculative_tokens num_speculative_tokens_per_batch_size "
            "use_local_argmax_reduction",
        _SAMPLING: "rejection_sample_method synthetic_acceptance_rates draft_sample_method "
                   "synthetic_acceptance_length enable_adaptive_verification",
        _GRAPH: "enforce_eager",
        "vLLM's own prefix cache finds KV, and computes none": "disable_eagle_block_drop",
    },
    "CompilationConfig": {
        _PLACE: "debug_dump_path cache_dir local_cache_dir compile_cache_save_format",
        _GRAPH: "cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes "
                "cudagraph_copy_inputs cudagraph_specialize_lora max_cudagraph_capture_size "
                "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
                "decoder_replay_trim_threshold cudagraph_mm_encoder "
                "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
                "encoder_cudagraph_max_frames_per_batch",
        _BATCH: "compile_sizes compile_ranges_endpoints",
        "it is noted while the model is made, in the process that makes it":
            "enabled_custom_ops disabled_custom_ops traced_files compilation_time "
            "encoder_compilation_time static_forward_context static_all_moe_layers",
        _START: "fast_moe_cold_start",
    },
}  # fmt: skip
"""By class: the reason, and which fields."""

VARIABLES: dict[str, str] = {
    _PLACE: "VLLM_PROCESS_NAME_PREFIX VLLM_LOOPBACK_IP VLLM_DP_RANK VLLM_DP_RANK_LOCAL "
            "VLLM_DP_SIZE VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST "
            "VLLM_P2P_SIDE_CHANNEL_PORT "
            "VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT "
            "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME CUDA_HOME "
            "VLLM_NCCL_SO_PATH VLLM_CUDART_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_RUST_FRONTEND_PATH "
            "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_USAGE_SOURCE "
            "VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_PER_WORKER_GPUS "
            "VLLM_RAY_BUNDLE_INDICES VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
            "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS "
            "VLLM_RPC_BASE_PATH VLLM_PORT VLLM_CACHE_ROOT VLLM_XLA_CACHE_PATH "
            "VLLM_CONFIG_ROOT LD_LIBRARY_PATH VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT "
            "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_HOST_IP VLLM_DEBUG_DUMP_PATH "
            "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH S3_ENDPOINT_URL "
            "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_ASSETS_CACHE "
            "VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CUDA_COMPATIBILITY_PATH "
            "VLLM_ENABLE_CUDA_COMPATIBILITY LOCAL_RANK CUDA_VISIBLE_DEVICES "
            "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING "
            "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_RINGBUFFER_WARNING_INTERVAL "
            "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_RANDOMIZE_DP_DUMMY_INPUTS",
    _START: "NVCC_THREADS VERBOSE CMAKE_BUILD_TYPE VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST "
            "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_PIPELINE "
            "VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_ENGINE_READY_TIMEOUT_S VLLM_PLUGINS "
            "VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DEEP_GEMM_WARMUP "
            "VLLM_SKIP_P2P_CHECK VLLM_DISABLE_LOG_LOGO VLLM_FASTSAFETENSORS_QUEUE_SIZE "
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_ALLOW_LONG_MAX_MODEL_LEN "
            "VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_CPU_CI_ENV "
            "MAX_JOBS VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_ENABLE_STARTUP_PLAN "
            "VLLM_FORCE_AOT_LOAD VLLM_SERVER_DEV_MODE "
            "VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SKIP_VERSION_SUFFIX "
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    _SEEN: "VLLM_CONFIGURE_LOGGING VLLM_TRACE_FUNCTION VLLM_LOG_BATCHSIZE_INTERVAL "
           "VLLM_MOONCAKE_STORE_TIER_LOG VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS "
           "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_GC_DEBUG "
           "VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS "
           "VLLM_PATTERN_MATCH_DEBUG VLLM_GPU_SYNC_CHECK VLLM_XLA_CHECK_RECOMPILATION "
           "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES "
            "VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK "
            "VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM "
            "VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR VLLM_LOG_STATS_INTERVAL "
            "VLLM_DEBUG_LOG_API_SERVER_RESPONSE NO_COLOR FORCE_COLOR",
    _LIMIT: "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS "
            "VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_XGRAMMAR_CACHE_MB "
            "VLLM_REGEX_COMPILATION_TIMEOUT_S "
            "VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ALLOW_INSECURE_SERIALIZATION "
            "VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S "
            "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_LOAD_RECV_THREADS "
            "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT "
            "VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
            "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS "
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
            "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT "
            "VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB "
            "VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES "
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT "
            "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S "
            "VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS "
            "VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS "
            "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE",
    _TOKENS: "VLLM_USE_FASTOKENS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_SYSTEM_START_DATE "
             "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS "
             "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_USE_RUST_FRONTEND "
             "VLLM_USE_RUST_BENCH VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT "
             "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_ENFORCE_STRICT_TOOL_CALLING "
             "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    _SAMPLING: "VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL "
               "VLLM_V1_USE_OUTLINES_CACHE VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN",
    _MEMORY: "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_ENABLE_CUDAGRAPH_GC "
             "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA "
             "VLLM_WSL2_ENABLE_PIN_MEMORY "
            "VLLM_CPU_KVCACHE_SPACE",
    "threads share the sums of a step, as batches do":
        "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU",
    _OURS: "VLLM_USE_SIMPLE_KV_OFFLOAD",
    "a secret": "VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY",
    "each rank says the layout that it has": "VLLM_KV_CACHE_LAYOUT",
    "measured settings of kernels: the same sums in another order, as between batches":
        "VLLM_TUNED_CONFIG_FOLDER VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS",
}  # fmt: skip
"""Environment variables that vLLM knows: the reason, and which."""
