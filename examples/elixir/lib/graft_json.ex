defmodule Graft.JSON do
  @moduledoc """
  JSON for the messages of `graft worker`: enough of it for Elixir 1.14, which has none.

  Use `JSON` (Elixir 1.18) or Jason in its place where you have one.
  """

  @doc "Encode maps, lists, strings, numbers, booleans and nil."
  def encode(nil), do: "null"
  def encode(true), do: "true"
  def encode(false), do: "false"
  def encode(value) when is_atom(value), do: encode(Atom.to_string(value))
  def encode(value) when is_number(value), do: to_string(value)
  def encode(value) when is_list(value), do: "[" <> Enum.map_join(value, ",", &encode/1) <> "]"

  def encode(value) when is_map(value) do
    "{" <>
      Enum.map_join(value, ",", fn {k, v} -> encode(to_string(k)) <> ":" <> encode(v) end) <> "}"
  end

  def encode(value) when is_binary(value) do
    "\"" <> for(<<c::utf8 <- value>>, into: "", do: escape(c)) <> "\""
  end

  defp escape(?"), do: "\\\""
  defp escape(?\\), do: "\\\\"
  defp escape(?\n), do: "\\n"
  defp escape(c) when c < 0x20, do: "\\u" <> String.pad_leading(Integer.to_string(c, 16), 4, "0")
  defp escape(c), do: <<c::utf8>>

  @doc "Decode one value: `{:ok, value}` or `:error`."
  def decode(text) do
    case value(skip(text)) do
      {found, rest} -> if skip(rest) == "", do: {:ok, found}, else: :error
    end
  catch
    :invalid -> :error
  end

  defp value("null" <> rest), do: {nil, rest}
  defp value("true" <> rest), do: {true, rest}
  defp value("false" <> rest), do: {false, rest}
  defp value("\"" <> rest), do: string(rest, [])
  defp value("[" <> rest), do: array(skip(rest), [])
  defp value("{" <> rest), do: object(skip(rest), %{})
  # Python writes these three; they become nil.
  defp value("NaN" <> rest), do: {nil, rest}
  defp value("Infinity" <> rest), do: {nil, rest}
  defp value("-Infinity" <> rest), do: {nil, rest}

  defp value(text) do
    case Regex.run(~r/\A-?\d+(\.\d+)?([eE][-+]?\d+)?/, text) do
      [number] -> {String.to_integer(number), after_number(text, number)}
      [number, "" | _] -> {exponent(number), after_number(text, number)}
      [number | _] -> {elem(Float.parse(number), 0), after_number(text, number)}
      nil -> throw(:invalid)
    end
  end

  defp exponent(number), do: elem(Float.parse(number), 0)

  defp after_number(text, number),
    do: binary_part(text, byte_size(number), byte_size(text) - byte_size(number))

  defp array("]" <> rest, done), do: {Enum.reverse(done), rest}

  defp array(text, done) do
    {found, rest} = value(text)

    case skip(rest) do
      "," <> more -> array(skip(more), [found | done])
      "]" <> more -> {Enum.reverse([found | done]), more}
      _ -> throw(:invalid)
    end
  end

  defp object("}" <> rest, done), do: {done, rest}

  defp object("\"" <> text, done) do
    {key, rest} = string(text, [])

    with ":" <> rest <- skip(rest),
         {found, rest} <- value(skip(rest)) do
      case skip(rest) do
        "," <> more -> object(skip(more), Map.put(done, key, found))
        "}" <> more -> {Map.put(done, key, found), more}
        _ -> throw(:invalid)
      end
    else
      _ -> throw(:invalid)
    end
  end

  defp object(_, _), do: throw(:invalid)

  defp string("\"" <> rest, done), do: {done |> Enum.reverse() |> IO.iodata_to_binary(), rest}

  defp string("\\u" <> <<high::binary-size(4), "\\u", low::binary-size(4), rest::binary>>, done)
       when binary_part(high, 0, 1) in ["d", "D"] and binary_part(high, 1, 1) in ~w(8 9 a b A B) do
    code = 0x10000 + (hex(high) - 0xD800) * 0x400 + (hex(low) - 0xDC00)
    string(rest, [<<code::utf8>> | done])
  end

  defp string("\\u" <> <<code::binary-size(4), rest::binary>>, done) do
    case hex(code) do
      lone when lone in 0xD800..0xDFFF -> string(rest, ["\uFFFD" | done])
      found -> string(rest, [<<found::utf8>> | done])
    end
  end

  defp string("\\" <> <<c, rest::binary>>, done), do: string(rest, [unescape(c) | done])
  defp string(<<c::utf8, rest::binary>>, done), do: string(rest, [<<c::utf8>> | done])
  defp string(_, _), do: throw(:invalid)

  defp unescape(?n), do: "\n"
  defp unescape(?t), do: "\t"
  defp unescape(?r), do: "\r"
  defp unescape(?b), do: "\b"
  defp unescape(?f), do: "\f"
  defp unescape(c) when c in [?", ?\\, ?/], do: <<c>>
  defp unescape(_), do: throw(:invalid)

  defp hex(text) do
    case Integer.parse(text, 16) do
      {code, ""} -> code
      _ -> throw(:invalid)
    end
  end

  defp skip(<<c, rest::binary>>) when c in [?\s, ?\n, ?\t, ?\r], do: skip(rest)
  defp skip(text), do: text
end
