[inputs: ["{lib,test}/**/*.{ex,exs}", "*.exs"], line_length: 100]
