"""Conversion of drafters and pairs between the formats of this project, Apple and TensorRT-LLM."""
