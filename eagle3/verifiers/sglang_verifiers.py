"""Which verifier classes SGLang 0.5.23 can capture aux hidden states from: those with set_eagle3_layers_to_capture.

Source: srt/models/*.py of the wheel; a class without the method stops the server (attention_backend_setup.py,
configure_aux_hidden_state_capture), and so does the Transformers backend, which serves the classes that SGLang has not.
tests/sglang_witness.py compares the list with the real registry.
"""

from __future__ import annotations

_WITH = """
    ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
    Cosmos3ForConditionalGeneration DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM
    ExaoneMoEForCausalLM ExaoneMoeForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration Glm4MoeForCausalLM Glm4MoeLiteForCausalLM
    Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM GptOssForCausalLM IQuestCoderForCausalLM
    InternLM3ForCausalLM InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration KimiK25ForConditionalGeneration Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM LongcatFlashForCausalLM MellumForCausalLM MiniMaxM2ForCausalLM
    MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM MistralForCausalLM
    MistralLarge3ForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2_5_VLForConditionalGeneration
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration SarvamMoEForCausalLM TeleFLMForCausalLM
"""
WITH_EAGLE3 = frozenset(_WITH.split())
