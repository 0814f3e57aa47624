"""What options are about."""

from rloo.config.fields import Subject

DATA = Subject("Model and data")
REWARDS = Subject("Rewards")
SAMPLING = Subject("Sampling")
OBJECTIVE = Subject("Objective")
KL = Subject("KL penalty and reference model")
LORA = Subject("LoRA")
QUANTISATION = Subject("Quantisation")
BATCHES = Subject("Batches and number of steps")
OPTIMIZER = Subject("Optimizer and learning rate")
MEMORY = Subject("Memory")
MACHINE = Subject("Precision, machine and seeds")
PROCESSES = Subject("Several processes")
EVALUATION = Subject("Evaluation")
SAVING = Subject("Saving and resuming")
LOGGING = Subject("Logging")
HUB = Subject("Hugging Face hub")
COMPATIBILITY = Subject("Compatibility")
