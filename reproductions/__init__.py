"""What the papers report beside what we measure: studies, their runs, stored results, and the page made of them."""
