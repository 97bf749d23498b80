"""Facts that come with the package, dated and with a source a row; and a team's own rows over them."""
