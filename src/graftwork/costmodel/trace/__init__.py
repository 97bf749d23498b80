"""What a step of transformers and PEFT asks of a card's memory, followed on tensors that have no memory."""
