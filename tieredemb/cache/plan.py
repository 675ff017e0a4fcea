"""What plans on every device agree on."""

DROPPED = -(2**31)  # home of an occurrence that takes no part: padding
