"""Pages of annotators and operators: templates, scripts and style sheets."""
