"""Says how a streamed model takes fields of TRL's configs that TrainingArguments lack. Needs no TRL."""

from __future__ import annotations

from collections.abc import Mapping

TRL_FOLLOWED: Mapping[str, str] = {
    "read where TRL makes rows and batches": """
        dataset_text_field dataset_kwargs dataset_num_proc shuffle_dataset eos_token pad_token max_length
        truncation_mode packing packing_strategy eval_packing padding_free pad_to_multiple_of completion_only_loss
        assistant_only_loss max_prompt_length max_completion_length
    """,
    "read where TRL computes the loss, from what the streamed model's forward gives": """
        loss_type loss_weights beta label_smoothing ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting
        discopop_tau desirable_weight undesirable_weight center_rewards_coefficient router_aux_loss_coef
        num_iterations epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos
        vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights scale_rewards
        multi_objective_aggregation mask_truncated_completions top_entropy_quantile entropy_coef use_adaptive_entropy
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold
        use_bias_correction_kl
    """,
    "sets the rate of dropout in the model's modules": "disable_dropout",
    "given to generate or generate_batch, which are the streamed model's": """
        use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config
        num_generations num_generations_eval generation_batch_size steps_per_generation temperature top_p top_k min_p
        repetition_penalty generation_kwargs cache_implementation chat_template_kwargs max_tool_calling_iterations
    """,
    "read where TRL starts and asks vLLM, which takes what Streamed.weights() gives": """
        vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_cap
    """,
    "of the reference, which is in RAM, or the model without its adapters": """
        precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    """,
    "read by loggers": """
        log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    """,
    "checked, since some values are refused": """
        model_init_kwargs trust_remote_code precompute_ref_log_probs chat_template_path use_vllm
    """,
}
"""Fields that mean what they mean over a plain model, by the reason why."""
TRL_WITHOUT_EFFECT: Mapping[str, str] = {
    "read by DeepSpeed alone, which is refused": "ds3_gather_for_generation",
}
"""Fields that change nothing over a streamed model, by the reason why."""
TRL_REFUSED: Mapping[str, str] = {
    "activation_offloading": (
        'activation_offloading moves what autograd saves: leave it out, and pass activations="offload" to '
        "megatier.stream."
    ),
    "cast_lm_head_to_fp32": (
        "cast_lm_head_to_fp32 casts the head's weight, which is on megatier's tiers: leave it out, or compute in fp32 "
        "(compute_dtype)."
    ),
}
"""Fields that are refused unless they ask for nothing (None, False or empty), and the message."""
