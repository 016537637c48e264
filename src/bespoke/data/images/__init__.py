"""Corruption, degradation, augmentation and normalisation of images."""
