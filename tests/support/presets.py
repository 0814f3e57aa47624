"""How far the gradient of each biased preset is from the exact one."""

# preset: (options, scale along the exact gradient, cosine with it), for K = 3 and beta = 0.3, as
# test_unbiased.py enumerates them.
PRESET_FORMS = {
    "areal": ({"preset": "areal"}, 0.7807, 0.9281),
    "areal_docs": ({"preset": "areal_docs"}, 0.4725, 0.9839),
    "areal_page": ({"preset": "areal_page"}, 0.5661, 0.9704),
    "ms_swift": ({"preset": "ms_swift"}, 0.5661, 0.9704),
    "verl": ({"preset": "verl"}, 0.5540, 0.9985),
    "openrlhf": ({"preset": "openrlhf"}, 0.5585, 0.9974),
    "nemo_rl": ({"preset": "nemo_rl"}, 1.1832, 0.8143),
    "reinforce_pp": ({"preset": "reinforce_pp"}, 0.8045, 0.9264),
    "reinforce_pp_baseline": ({"preset": "reinforce_pp_baseline"}, 0.6839, 0.9796),
    "grpo": ({"preset": "grpo"}, 0.6319, 0.8666),
    "dr_grpo": ({"preset": "dr_grpo"}, 0.3092, 0.9288),
    "opo": ({"preset": "opo"}, 0.6596, 0.9981),
    "optimal_token_baseline": ({"preset": "optimal_token_baseline"}, 0.3376, 0.9953),
}
