"""The language of texts, by script and function words."""

import pytest

from graftwork.text.language import guess_language

TEXTS = {
    "en": "The order is late and the customer asks what to do with it.",
    "de": "Die Bestellung ist nicht da und der Kunde fragt, was mit dem Geld wird.",
    "fr": "La commande est en retard et le client demande ce que nous pouvons faire pour lui.",
    "es": "El pedido no está y el cliente pregunta qué se hace con los datos de la compra.",
    "ru": "Заказ опаздывает, и клиент спрашивает, что делать.",
    "ja": "注文が遅れています。どうすればよいですか。",
    "zh": "订单迟到了,客户问该怎么办。",
}


@pytest.mark.parametrize("code", sorted(TEXTS))
def test_the_language_of_texts_is_recognized(code):
    assert guess_language([TEXTS[code]] * 20) == code


@pytest.mark.parametrize("texts", [[], ["ok"], ["{}"] * 50, ["x = 1\ny = x + 2"] * 50])
def test_texts_without_a_clear_language_have_none(texts):
    assert guess_language(texts) is None
