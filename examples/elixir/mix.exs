defmodule Graft.MixProject do
  use Mix.Project

  # No dependencies: it compiles offline with Elixir 1.14 and later.
  def project do
    [app: :graft, version: "0.1.0", elixir: "~> 1.14", deps: []]
  end

  def application, do: [extra_applications: [:logger]]
end
