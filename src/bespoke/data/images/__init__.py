"""What happens to images."""
