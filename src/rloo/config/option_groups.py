"""The groups of options, by subject."""

from rloo.config.fields import OptionGroup

DATA = OptionGroup("Model and data")
REWARDS = OptionGroup("Rewards")
SAMPLING = OptionGroup("Sampling")
OBJECTIVE = OptionGroup("Objective")
KL = OptionGroup("KL penalty and reference model")
LORA = OptionGroup("LoRA")
QUANTISATION = OptionGroup("Quantisation")
BATCHES = OptionGroup("Batches and number of steps")
OPTIMIZER = OptionGroup("Optimizer and learning rate")
MEMORY = OptionGroup("Memory")
MACHINE = OptionGroup("Precision, machine and seeds")
PROCESSES = OptionGroup("Several processes")
EVALUATION = OptionGroup("Evaluation")
SAVING = OptionGroup("Saving and resuming")
LOGGING = OptionGroup("Logging")
HUB = OptionGroup("Hugging Face hub")
TOOLS = OptionGroup("Tools")
VLLM = OptionGroup("Sampling with vLLM")
