"""What a drafter is worth: trees walked along texts that the base wrote once."""
