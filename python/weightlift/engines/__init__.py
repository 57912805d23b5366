"""Where weightlift stands in for, or inside of, what others wrote."""
