"""Plans hardware before it is bought (`headrace plan`). docs/planning.md says what is computed, and from what."""
