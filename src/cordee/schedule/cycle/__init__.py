"""The scheduling cycle and its steps: settle, order, try, reserve, grow, wake."""
