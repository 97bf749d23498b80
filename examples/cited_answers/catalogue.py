"""What the twelve help desks of the demo know, and how people ask for it.

In: nothing. Out: `DOMAINS`, the raw material from which `make_log.py` builds the log.

A domain has a table of things (one per line, one column per attribute) and, for each attribute,
several ways to state it in a source, to ask for it and to answer. `{e}` stands for the thing,
`{v}` for the value, `{s}` for the thing with its article or for a pronoun. Everything here is
invented: the places, the prices, the first names.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attribute:
    """One property of the things in a domain and the sentences that speak of it."""

    sources: tuple[str, ...]
    questions: tuple[str, ...]
    indirect: str
    answers: tuple[str, ...]
    also: str


@dataclass(frozen=True)
class Domain:
    """One help desk: `unlisted` are questions that no source ever answers, `asides` are filler."""

    role: str
    subject: str
    attributes: tuple[Attribute, ...]
    table: str
    unlisted: tuple[str, ...]
    asides: tuple[str, ...]

    def rows(self) -> dict[str, tuple[str, ...]]:
        """The table as thing -> values, in the order of `attributes`."""
        found = {}
        for line in self.table.strip().splitlines():
            name, *values = (cell.strip() for cell in line.split("|"))
            if len(values) != len(self.attributes):
                raise ValueError(f"{self.role}: {name} has {len(values)} values")
            found[name] = tuple(values)
        return found


GARDEN = Domain(
    role="garden-helpdesk",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "Look for the {e} {v}.",
                "Our {e} was planted {v}.",
                "Map note: {e}, {v}.",
            ),
            questions=(
                "Where can I see the {e}?",
                "Which part of the garden has the {e}?",
                "I walked past everything but the {e}. Where is it?",
            ),
            indirect="where {s} grows",
            answers=("The {e} grows {v}.", "You can see it {v}."),
            also="it grows {v}",
        ),
        Attribute(
            sources=(
                "Expect the {e} to flower in {v}.",
                "{v} is when the {e} comes into bloom.",
                "The {e} opens its first flowers in {v}.",
            ),
            questions=(
                "When does the {e} bloom?",
                "What month should I come to see the {e} in flower?",
                "Is there a best time to photograph the {e} flowering?",
            ),
            indirect="when {s} flowers",
            answers=("The {e} flowers in {v}.", "It blooms in {v}."),
            also="it flowers in {v}",
        ),
        Attribute(
            sources=(
                "The {e} was collected in {v}.",
                "In the wild, the {e} is found in {v}.",
                "Label: {e}. Native to {v}.",
            ),
            questions=(
                "What is the {e} native to?",
                "Where in the world does the {e} come from?",
                "What is the origin of the {e}?",
            ),
            indirect="where {s} comes from",
            answers=("The {e} comes from {v}.", "It is native to {v}."),
            also="it comes from {v}",
        ),
        Attribute(
            sources=(
                "Gardeners water the {e} {v}.",
                "Watering plan: the {e} gets a can {v}.",
                "The {e} wants a drink {v}, no more.",
            ),
            questions=(
                "How often is the {e} watered?",
                "I bought a {e} in your shop. How often should I water it?",
                "What watering does the {e} need?",
            ),
            indirect="how often {s} is watered",
            answers=("Water the {e} {v}.", "It is watered {v}."),
            also="it is watered {v}",
        ),
    ),
    table="""
    marsh iris     | in the bog garden       | June      | the Danube delta  | every day
    tree fern      | in the fern house       | August    | Tasmania          | twice a day
    snow poppy     | on the north terrace    | April     | the Altai         | once a week
    blue ginger    | in the tropical hall    | October   | Brazil            | three times a week
    dwarf quince   | beside the orchard gate | March     | Honshu            | every ten days
    silver thistle | on the dry bank         | July      | the Apennines     | once a month
    lantern lily   | behind the tea room     | September | Natal             | on Mondays
    rock rose      | along the south wall    | May       | Crete             | every two weeks
    paper birch    | by the east entrance    | late May  | Labrador          | only in drought
    pitcher plant  | in greenhouse two       | November  | Borneo            | every morning
    honey myrtle   | next to the beehives    | December  | Western Australia | every third day
    winter jasmine | under the clock arch    | January   | Sichuan           | twice a month
    moon orchid    | in the glass gallery    | February  | Java              | on Fridays
    """,
    unlisted=(
        "Can I bring my dog into the garden?",
        "Do you rent wheelchairs at the gate?",
        "What does a family ticket cost?",
        "Is there a bus stop near the garden?",
        "May we hold a wedding on the lawn?",
        "Who designed the sundial?",
        "Do you sell compost by the bag?",
        "Are drones allowed over the lake?",
        "How many gardeners work here?",
    ),
    asides=(
        "The tea room takes cards only.",
        "Paths may be slippery after rain.",
        "Guided walks leave from the sundial.",
        "Please do not pick seed heads.",
    ),
)

LIBRARY = Domain(
    role="library-desk",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "The {e} is {v}.",
                "Signs to the {e} lead you to a door {v}.",
                "Since the move, the {e} can be found {v}.",
            ),
            questions=(
                "Where is the {e}?",
                "How do I find the {e}?",
                "Which way do I go for the {e}?",
            ),
            indirect="where {s} is",
            answers=("The {e} is {v}.", "You will find it {v}."),
            also="it is {v}",
        ),
        Attribute(
            sources=(
                "The {e} closes at {v}.",
                "Last visitors leave the {e} at {v}.",
                "Doors of the {e} are locked at {v}.",
            ),
            questions=(
                "When does the {e} close?",
                "How late can I stay in the {e}?",
                "What is the closing time of the {e}?",
            ),
            indirect="when {s} closes",
            answers=("The {e} closes at {v}.", "It is open until {v}."),
            also="it closes at {v}",
        ),
        Attribute(
            sources=(
                "To use the {e} you need {v}.",
                "Entry to the {e} takes {v}.",
                "The {e} admits readers with {v}.",
            ),
            questions=(
                "What do I need to get into the {e}?",
                "Is anything required to use the {e}?",
                "What should I bring for a visit to the {e}?",
            ),
            indirect="what {s} requires",
            answers=("You need {v} for the {e}.", "Entry requires {v}."),
            also="it requires {v}",
        ),
        Attribute(
            sources=(
                "{v} looks after the {e}.",
                "Questions about the {e} go to {v}.",
                "The {e} is in the care of {v}.",
            ),
            questions=(
                "Who is in charge of the {e}?",
                "Whom should I ask about the {e}?",
                "Who runs the {e}?",
            ),
            indirect="who runs {s}",
            answers=("{v} runs the {e}.", "Please ask {v}."),
            also="it is run by {v}",
        ),
    ),
    table="""
    map room          | on the third floor        | 17:30 | a reader card       | Ottoline
    newspaper archive | in the basement           | 16:00 | a booking           | Mr Tarrant
    children's corner | beside the main stairs    | 18:00 | an adult companion  | Bea
    listening booth   | behind the music shelves  | 20:00 | your own headphones | Casimir
    seed library      | in the courtyard          | 15:45 | a labelled envelope | Mrs Ferrow
    quiet study       | on the top floor          | 22:00 | a day pass          | the night porter
    local history bay | next to the lift          | 19:15 | a signed form       | Dr Quill
    print studio      | in the annex              | 21:00 | an apron            | Leopold
    manga wall        | opposite the returns desk | 18:45 | a junior card       | Yuna
    rare books vault  | below the reading hall    | 14:30 | two forms of ID     | the archivist
    language lab      | on the mezzanine          | 20:30 | a course number     | Ilse
    braille shelf     | left of the front door    | 19:00 | a library badge     | Hamish
    puzzle exchange   | in the old cloakroom      | 17:00 | a complete puzzle   | the Saturday team
    """,
    unlisted=(
        "Can I renew my books by post?",
        "How much is the fine for a lost DVD?",
        "Is there parking for bicycles?",
        "Do you lend laptops to students?",
        "When is the next book sale?",
        "Can I donate my old encyclopedia?",
        "Is the building open on public holidays?",
        "How many books may I borrow at once?",
        "Do you have a lost property box?",
    ),
    asides=(
        "Drinks with lids are welcome in the foyer.",
        "The lift is being serviced this week.",
        "Please return baskets to the front desk.",
        "Story hour is full until the end of term.",
    ),
)

WORKSHOP = Domain(
    role="workshop-helper",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "The {e} stands in {v}.",
                "We moved the {e} to {v} in spring.",
                "{v} now houses the {e}.",
            ),
            questions=(
                "Where is the {e}?",
                "Which bay has the {e}?",
                "I can't find the {e}. Where did it go?",
            ),
            indirect="where {s} stands",
            answers=("The {e} is in {v}.", "It stands in {v}."),
            also="it stands in {v}",
        ),
        Attribute(
            sources=(
                "Members must complete {v} before using the {e}.",
                "Nobody runs the {e} without {v}.",
                "The {e} is unlocked for you after {v}.",
            ),
            questions=(
                "What training do I need for the {e}?",
                "May I use the {e} as a new member, or is there a course?",
                "What must I do before I can run the {e}?",
            ),
            indirect="what training {s} needs",
            answers=("You need {v} first.", "The {e} requires {v}."),
            also="it requires {v}",
        ),
        Attribute(
            sources=(
                "Time on the {e} costs {v}.",
                "The {e} is billed at {v}.",
                "Price list: {e}, {v}.",
            ),
            questions=(
                "What does the {e} cost?",
                "How much do you charge for the {e}?",
                "Is the {e} free, and if not, what is the fee?",
            ),
            indirect="what {s} costs",
            answers=("The {e} costs {v}.", "You pay {v}."),
            also="it costs {v}",
        ),
        Attribute(
            sources=(
                "Wear {v} at the {e}.",
                "Safety card, {e}: {v} at all times.",
                "The {e} is used with {v} only.",
            ),
            questions=(
                "What protection do I wear at the {e}?",
                "Which safety gear does the {e} call for?",
                "Do I need protective gear for the {e}?",
            ),
            indirect="what safety gear {s} calls for",
            answers=("Wear {v} at the {e}.", "It calls for {v}."),
            also="it calls for {v}",
        ),
    ),
    table="""
    wood lathe    | bay 3            | the lathe evening   | 4 euros an hour   | a face shield
    bandsaw       | the timber hall  | a blade test        | 2 euros a session | safety glasses
    laser cutter  | room 12          | the laser course    | 30 cents a minute | tinted goggles
    kiln          | the back yard    | a firing lesson     | 9 euros a load    | heat-proof gloves
    screen press  | the loft         | a one-hour intro    | 5 euros a day     | an old shirt
    plasma torch  | bay 7            | the metal exam      | 12 euros an hour  | a welding mask
    sewing table  | the textile room | a needle talk       | 1 euro an evening | a thimble
    drill press   | bay 1            | a clamp check       | 1 euro a session  | ear plugs
    vacuum former | the mould shop   | a mentor's sign-off | 3 euros a sheet   | cotton sleeves
    sand blaster  | the blue shed    | the dust briefing   | 8 euros an hour   | a respirator
    book binder   | the paper corner | a short video       | 50 cents a book   | a finger guard
    resin printer | the fume cabinet | the chemistry class | 20 cents a gram   | nitrile gloves
    belt grinder  | bay 5            | a spark-safety talk | 6 euros a day     | a leather apron
    """,
    unlisted=(
        "Can I store my project over the weekend?",
        "Do you have lockers for members?",
        "Is there a discount for pensioners?",
        "Who do I call if the alarm goes off?",
        "May I bring a guest on Tuesday evening?",
        "Do you sell plywood offcuts?",
        "How do I cancel my membership?",
        "Is the coffee machine working again?",
        "Can children join the open day?",
    ),
    asides=(
        "Sweep your bench before you leave.",
        "The compressor is noisy until noon.",
        "Scrap metal goes into the red crate.",
        "Keys hang behind the front counter.",
    ),
)

MUSEUM = Domain(
    role="museum-guide",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "The {e} was made from {v}.",
                "Craftsmen shaped the {e} out of {v}.",
                "Catalogue: {e}; material, {v}.",
            ),
            questions=(
                "What is the {e} made of?",
                "Which material was used for the {e}?",
                "My daughter wonders what the {e} is made from.",
            ),
            indirect="what {s} is made of",
            answers=("The {e} is made of {v}.", "It was made from {v}."),
            also="it is made of {v}",
        ),
        Attribute(
            sources=(
                "Workmen stumbled on the {e} in {v}.",
                "The {e} came to light in {v}.",
                "A farmer discovered the {e} in {v}.",
            ),
            questions=(
                "Where was the {e} found?",
                "What is the find spot of the {e}?",
                "Where did someone discover the {e}?",
            ),
            indirect="where {s} was found",
            answers=("The {e} was found in {v}.", "It was discovered in {v}."),
            also="it was found in {v}",
        ),
        Attribute(
            sources=(
                "Visitors can view the {e} in {v}.",
                "The {e} is on show in {v}.",
                "{v} displays the {e}.",
            ),
            questions=(
                "Which room is the {e} in?",
                "Where do I go to look at the {e}?",
                "Where is the {e} displayed?",
            ),
            indirect="where {s} is displayed",
            answers=("The {e} is in {v}.", "It is shown in {v}."),
            also="it is shown in {v}",
        ),
        Attribute(
            sources=(
                "Scholars date the {e} to {v}.",
                "The {e} goes back to {v}.",
                "Tests trace the {e} to {v}.",
            ),
            questions=(
                "How old is the {e}?",
                "When was the {e} made?",
                "What period does the {e} date from?",
            ),
            indirect="what period {s} dates from",
            answers=("The {e} dates from {v}.", "It goes back to {v}."),
            also="it dates from {v}",
        ),
    ),
    table="""
    heron brooch    | gilded bronze    | a peat bog       | the Amber Room    | the fifth century
    salt ship       | carved whalebone | a flooded cellar | gallery 4         | about 1640
    weeping mask    | baked clay       | a dry well       | the long hall     | the Iron Age
    copper drum     | hammered copper  | a river bend     | gallery 9         | the Bronze Age
    pilgrim's flask | boiled leather   | a church roof    | the crypt         | the year 1388
    glass comb      | green glass      | a Roman drain    | the light cabinet | the second century
    bear cradle     | limewood         | a mountain hut   | the attic room    | around 1790
    star clock      | brass and walnut | a bishop's study | the dome          | the year 1702
    reed harp       | river reed       | a sand dune      | gallery 2         | the third dynasty
    twin-tailed cup | beaten silver    | a ploughed field | the treasury      | the tenth century
    fox banner      | dyed wool        | a town gate      | the east stair    | the Swedish war
    horn lantern    | cow horn         | an old mine      | gallery 7         | the 1850s
    chess abbot     | walrus ivory     | a ruined abbey   | the round tower   | the twelfth century
    """,
    unlisted=(
        "Can I take photos with a flash?",
        "Is there a cafe in the museum?",
        "How long is the audio tour?",
        "Do teachers get in for free?",
        "Where can I leave my backpack?",
        "What is the next special exhibition?",
        "Can we book a birthday party here?",
        "Are there postcards in the shop?",
        "Which tram goes to the museum?",
    ),
    asides=(
        "The lights are kept low to protect textiles.",
        "Large groups enter by the side door.",
        "Copies may be handled on Sundays.",
        "Some labels are still being translated.",
    ),
)

FERRY = Domain(
    role="ferry-info",
    subject="the {e} ferry",
    attributes=(
        Attribute(
            sources=(
                "The {e} ferry sails at {v}.",
                "Timetable: {e} ferry, departure {v}.",
                "Be aboard the {e} ferry before {v}, when it casts off.",
            ),
            questions=(
                "When does the {e} ferry leave?",
                "What time is the departure of the {e} ferry?",
                "At what time should I be at the dock for the {e} ferry?",
            ),
            indirect="when {s} leaves",
            answers=("The {e} ferry leaves at {v}.", "It departs at {v}."),
            also="it leaves at {v}",
        ),
        Attribute(
            sources=(
                "Crossing on the {e} ferry takes {v}.",
                "Allow {v} for the trip on the {e} ferry.",
                "In calm seas the {e} ferry needs {v}.",
            ),
            questions=(
                "How long does the {e} ferry take?",
                "What is the crossing time of the {e} ferry?",
                "Is the {e} ferry quick? How long is the trip?",
            ),
            indirect="how long {s} takes",
            answers=("The {e} ferry takes {v}.", "The crossing takes {v}."),
            also="it takes {v}",
        ),
        Attribute(
            sources=(
                "A single on the {e} ferry is {v}.",
                "The {e} ferry charges adults {v}.",
                "Fares: {e} ferry, {v} one way.",
            ),
            questions=(
                "What does the {e} ferry cost?",
                "How much is an adult ticket on the {e} ferry?",
                "What fare do I pay for the {e} ferry?",
            ),
            indirect="what {s} costs",
            answers=("The {e} ferry costs {v}.", "A single ticket is {v}."),
            also="it costs {v}",
        ),
        Attribute(
            sources=(
                "The {e} ferry boards at {v}.",
                "Go to {v} for the {e} ferry.",
                "Ticket print: {e} ferry, from {v}.",
            ),
            questions=(
                "Where do I board the {e} ferry?",
                "From which pier does the {e} ferry go?",
                "Which dock is used by the {e} ferry?",
            ),
            indirect="where {s} boards",
            answers=("The {e} ferry boards at {v}.", "Board it at {v}."),
            also="it boards at {v}",
        ),
    ),
    table="""
    Skarvik      | 06:40 | 35 minutes         | 11 crowns | pier 2
    Gull Rock    | 09:15 | 20 minutes         | 6 crowns  | the fish quay
    Oystermouth  | 13:05 | an hour and a half | 24 crowns | pier 5
    Little Hamna | 07:55 | 12 minutes         | 3 crowns  | the stone steps
    Fennoy       | 16:20 | two hours          | 31 crowns | the main terminal
    Brackwater   | 10:30 | 50 minutes         | 15 crowns | the customs dock
    Saint Orla   | 18:45 | three hours        | 40 crowns | pier 8
    Tern Island  | 11:10 | 25 minutes         | 8 crowns  | the yacht club
    Kelpford     | 14:50 | 40 minutes         | 13 crowns | the north jetty
    Lower Ness   | 05:30 | 65 minutes         | 18 crowns | pier 1
    Marrowby     | 20:00 | 75 minutes         | 21 crowns | the grain wharf
    Cape Dunlin  | 12:25 | four hours         | 52 crowns | the cruise berth
    Pilot's Cove | 17:35 | 15 minutes         | 5 crowns  | the lifeboat slip
    """,
    unlisted=(
        "Can I take a kayak on board?",
        "Is there a toilet for wheelchair users?",
        "Do dogs travel free?",
        "What happens if a sailing is cancelled by fog?",
        "Do you have a season pass?",
        "Can I pay the driver in cash?",
        "Is hot food sold on the boats?",
        "Where do I claim a lost umbrella?",
        "How many cars fit on the boat?",
    ),
    asides=(
        "Deck seats get wet in a westerly wind.",
        "The ticket hall has a new roof.",
        "Luggage is stacked by the crew.",
        "Sailings are announced by bell.",
    ),
)

COOKING = Domain(
    role="cookery-school",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "Bake the {e} at {v}.",
                "For the {e}, set the oven to {v}.",
                "The {e} goes in once the oven reaches {v}.",
            ),
            questions=(
                "How hot should the oven be for the {e}?",
                "At what temperature do I bake the {e}?",
                "What oven setting does the {e} want?",
            ),
            indirect="how hot the oven must be for {s}",
            answers=("Bake the {e} at {v}.", "Set the oven to {v}."),
            also="it bakes at {v}",
        ),
        Attribute(
            sources=(
                "The {e} is done after {v}.",
                "Leave the {e} in the oven for {v}.",
                "Give the {e} {v} and do not open the door.",
            ),
            questions=(
                "How long does the {e} bake?",
                "When is the {e} ready to come out?",
                "What is the baking time for the {e}?",
            ),
            indirect="how long {s} bakes",
            answers=("The {e} bakes for {v}.", "It needs {v}."),
            also="it bakes for {v}",
        ),
        Attribute(
            sources=(
                "The secret of the {e} is {v}.",
                "{v} gives the {e} its flavour.",
                "Season the {e} with {v}.",
            ),
            questions=(
                "What is the {e} flavoured with?",
                "Which ingredient gives the {e} its taste?",
                "What seasoning goes into the {e}?",
            ),
            indirect="what {s} is seasoned with",
            answers=("The {e} is seasoned with {v}.", "It gets its taste from {v}."),
            also="it is seasoned with {v}",
        ),
        Attribute(
            sources=(
                "Serve the {e} with {v}.",
                "The {e} comes to the table with {v}.",
                "Our cooks pair the {e} with {v}.",
            ),
            questions=(
                "What do I serve with the {e}?",
                "What goes well beside the {e}?",
                "Any side for the {e}?",
            ),
            indirect="what {s} is served with",
            answers=("Serve the {e} with {v}.", "It goes with {v}."),
            also="it is served with {v}",
        ),
    ),
    table="""
    leek tart       | 190 degrees | 35 minutes   | nutmeg         | a green salad
    plum crumble    | 175 degrees | 40 minutes   | star anise     | cold custard
    herring pie     | 200 degrees | 50 minutes   | fresh dill     | boiled beetroot
    barley loaf     | 230 degrees | 28 minutes   | toasted malt   | salted butter
    stuffed marrow  | 180 degrees | an hour      | smoked paprika | brown rice
    almond ring     | 165 degrees | 22 minutes   | orange peel    | sweet wine
    shepherd's bake | 210 degrees | 45 minutes   | thyme          | pickled cabbage
    saffron bun     | 220 degrees | 11 minutes   | saffron        | hot milk
    onion flan      | 185 degrees | half an hour | caraway        | cider
    rabbit terrine  | 150 degrees | two hours    | juniper        | rye toast
    lentil moussaka | 195 degrees | 55 minutes   | cinnamon       | thick yoghurt
    chestnut roll   | 170 degrees | 17 minutes   | dark rum       | whipped cream
    cheese galette  | 240 degrees | 14 minutes   | black pepper   | sliced pears
    """,
    unlisted=(
        "Is there a course for beginners in May?",
        "Can I freeze leftover dough?",
        "Which knife should I buy first?",
        "Do you cater for office lunches?",
        "How do I clean a burnt pan?",
        "Can I get a refund for the sushi evening?",
        "Is the school kitchen free of peanuts?",
        "What size are your mixing bowls?",
        "Who won the jam contest last year?",
    ),
    asides=(
        "Aprons are washed after each class.",
        "Taste before you add more salt.",
        "Eggs should be at room temperature.",
        "Sharp knives stay on the rack.",
    ),
)

LEISURE = Domain(
    role="leisure-centre",
    subject="{e}",
    attributes=(
        Attribute(
            sources=(
                "The class in {e} meets {v}.",
                "New timetable: {e} runs {v}.",
                "Join {e} {v}.",
            ),
            questions=(
                "When is {e}?",
                "What day is the class in {e}?",
                "I would like to try {e}. When does it take place?",
            ),
            indirect="when {s} takes place",
            answers=("The class in {e} meets {v}.", "It takes place {v}."),
            also="it takes place {v}",
        ),
        Attribute(
            sources=(
                "{v} teaches {e}.",
                "This term {e} is led by {v}.",
                "The coach for {e} is {v}.",
            ),
            questions=(
                "Who teaches {e}?",
                "Who is the instructor for {e}?",
                "Which coach leads {e}?",
            ),
            indirect="who teaches {s}",
            answers=("{v} teaches {e}.", "The instructor is {v}."),
            also="it is taught by {v}",
        ),
        Attribute(
            sources=(
                "Places in {e} are limited to {v}.",
                "There is room in {e} for {v}.",
                "We cap {e} at {v}.",
            ),
            questions=(
                "How many people can join {e}?",
                "What is the group size in {e}?",
                "How big is the class for {e}?",
            ),
            indirect="how many people can join {s}",
            answers=("There is room for {v} in {e}.", "It takes {v}."),
            also="it takes {v}",
        ),
        Attribute(
            sources=(
                "For {e}, bring {v}.",
                "People doing {e} should pack {v}.",
                "You cannot do {e} without {v}.",
            ),
            questions=(
                "What should I bring to {e}?",
                "What do I pack for {e}?",
                "Do I need to bring anything to {e}?",
            ),
            indirect="what to bring to {s}",
            answers=("Bring {v} to {e}.", "You should bring {v}."),
            also="people bring {v}",
        ),
    ),
    table="""
    aqua jogging      | on Tuesdays at 7     | Marisol   | 16 swimmers      | a float belt
    chair yoga        | on Monday mornings   | Anselm    | twelve people    | a cushion
    junior judo       | on Saturdays at 10   | Keiko     | 20 children      | a clean suit
    wall climbing     | on Thursday nights   | Rufus     | eight climbers   | soft shoes
    tap dance         | on Fridays at 5      | Dorothea  | fourteen pairs   | hard-soled shoes
    stroke clinic     | on Sundays at noon   | Piet      | six swimmers     | goggles
    fencing           | on Wednesdays at 6   | Isaura    | ten fencers      | a glove
    walking football  | on Friday mornings   | Desmond   | 22 players       | shin pads
    baby splash       | on Tuesdays at 9     | Nell      | nine families    | a swim nappy
    spin club         | on Mondays at 6:30   | Bartek    | 25 riders        | a towel
    tai chi           | every day at dawn    | Master Lo | thirty people    | loose clothes
    roller disco      | on the last Saturday | Xanthe    | sixty skaters    | wrist guards
    underwater hockey | on Thursdays at 8    | Gorm      | two teams of six | a snorkel
    """,
    unlisted=(
        "Is the sauna mixed on weekends?",
        "How warm is the big pool?",
        "Can I freeze my membership?",
        "Where do I get a locker coin?",
        "Do you have a physiotherapist?",
        "Is there a shower for wheelchair users?",
        "What is the minimum age for the gym?",
        "Do you accept company vouchers?",
        "Why was the car park closed?",
    ),
    asides=(
        "Hair dryers are by the mirrors.",
        "Outdoor shoes stay at the entrance.",
        "The clock in the hall runs slow.",
        "Spectators sit on the balcony.",
    ),
)

BICYCLES = Domain(
    role="bicycle-shop",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "We charge {v} for the {e}.",
                "The {e} comes to {v}, parts included.",
                "Service menu: {e}, {v}.",
            ),
            questions=(
                "What does the {e} cost?",
                "How much would you ask for the {e}?",
                "What is the price of the {e}?",
            ),
            indirect="what {s} costs",
            answers=("The {e} costs {v}.", "The price is {v}."),
            also="it costs {v}",
        ),
        Attribute(
            sources=(
                "The {e} is finished within {v}.",
                "Our mechanics need {v} for the {e}.",
                "Plan {v} for the {e}.",
            ),
            questions=(
                "How long does the {e} take?",
                "How soon is the {e} finished?",
                "If I drop it off now, how long would the {e} take?",
            ),
            indirect="how long {s} takes",
            answers=("The {e} takes {v}.", "Allow {v} for it."),
            also="it takes {v}",
        ),
        Attribute(
            sources=(
                "The {e} carries a guarantee of {v}.",
                "We stand behind the {e} for {v}.",
                "After the {e} you are covered for {v}.",
            ),
            questions=(
                "What guarantee is there on the {e}?",
                "How long is the {e} under warranty?",
                "For how long do you guarantee the {e}?",
            ),
            indirect="how long {s} is guaranteed",
            answers=("The {e} is guaranteed for {v}.", "The warranty runs for {v}."),
            also="it is guaranteed for {v}",
        ),
        Attribute(
            sources=(
                "The {e} is the job of {v}.",
                "{v} does every {e} here.",
                "Ask for {v} when booking the {e}.",
            ),
            questions=(
                "Who does the {e}?",
                "Which mechanic handles the {e}?",
                "Who will be working on the {e}?",
            ),
            indirect="who does {s}",
            answers=("{v} does the {e}.", "It is done by {v}."),
            also="it is done by {v}",
        ),
    ),
    table="""
    brake tune     | 18 pounds  | half an hour     | three months     | Agnes
    wheel truing   | 14 pounds  | one afternoon    | six weeks        | old Tobias
    chain swap     | 27 pounds  | 20 minutes       | 1000 kilometres  | the apprentice
    winter check   | 65 pounds  | two days         | the whole winter | Wendeline
    hub rebuild    | 48 pounds  | three days       | two years        | Mr Osei
    fork service   | 90 pounds  | a full week      | a year           | the Thursday crew
    tyre change    | 9 pounds   | ten minutes      | thirty days      | anyone at the counter
    battery test   | 22 pounds  | one hour         | 90 days          | Farid
    saddle fitting | 35 pounds  | 45 minutes       | half a year      | Lucinda
    frame respray  | 140 pounds | three weeks      | five years       | the paint shop
    dynamo repair  | 31 pounds  | a day and a half | eight months     | Greta
    cargo assembly | 75 pounds  | four hours       | ten months       | Mirela
    spoke patch    | 6 pounds   | a coffee break   | one week         | Jonas
    """,
    unlisted=(
        "Do you buy used children's bikes?",
        "Can I hire a tandem for Sunday?",
        "Do you deliver to the next town?",
        "Which helmet size do I need?",
        "Is there a ride for beginners?",
        "Can I pay in three instalments?",
        "Do you engrave bikes against theft?",
        "Where can I pump my tyres at night?",
        "Do you stock unicycles?",
    ),
    asides=(
        "Please clean muddy bikes first.",
        "The bell above the door is broken.",
        "Old tubes are turned into belts.",
        "We are busiest in April.",
    ),
)

TRAILS = Domain(
    role="park-ranger",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "The {e} is {v} long.",
                "From end to end the {e} measures {v}.",
                "Walkers cover {v} on the {e}.",
            ),
            questions=(
                "How long is the {e}?",
                "What distance is the {e}?",
                "How far would I walk on the {e}?",
            ),
            indirect="how long {s} is",
            answers=("The {e} is {v} long.", "It measures {v}."),
            also="it is {v} long",
        ),
        Attribute(
            sources=(
                "The {e} starts at {v}.",
                "Begin the {e} at {v}.",
                "Yellow arrows for the {e} set off from {v}.",
            ),
            questions=(
                "Where does the {e} start?",
                "Where do I pick up the {e}?",
                "What is the starting point of the {e}?",
            ),
            indirect="where {s} starts",
            answers=("The {e} starts at {v}.", "It begins at {v}."),
            also="it starts at {v}",
        ),
        Attribute(
            sources=(
                "The {e} is closed because of {v}.",
                "Because of {v} the {e} is shut for now.",
                "Rangers shut the {e} after reports of {v}.",
            ),
            questions=(
                "Why is the {e} closed?",
                "What is the reason for shutting the {e}?",
                "Why can't we walk the {e} today?",
            ),
            indirect="why {s} is closed",
            answers=("The {e} is closed because of {v}.", "It is shut because of {v}."),
            also="it is closed because of {v}",
        ),
        Attribute(
            sources=(
                "From the {e} you can see {v}.",
                "The {e} is loved for its view of {v}.",
                "Hikers on the {e} often spot {v}.",
            ),
            questions=(
                "What can you see from the {e}?",
                "What is the highlight of the {e}?",
                "What might we spot along the {e}?",
            ),
            indirect="what one can see from {s}",
            answers=("From the {e} you can see {v}.", "You may see {v}."),
            also="it offers a sight of {v}",
        ),
    ),
    table="""
    otter loop       | 4 kilometres  | the mill bridge    | high water       | otters
    ridge path       | 11 kilometres | the upper car park | rockfall         | two castles
    charcoal trail   | 7 kilometres  | the forester's hut | logging          | old kilns
    nine springs way | 16 kilometres | the chapel         | a landslide      | the waterfall
    cuckoo walk      | 2 kilometres  | the playground     | nesting birds    | wild daffodils
    smuggler's steps | 900 metres    | the shingle beach  | loose railings   | the lighthouse
    moor crossing    | 19 kilometres | the cattle grid    | fire risk        | wild ponies
    beaver boardwalk | 1500 metres   | the visitor hut    | rotten planks    | a beaver dam
    quarry circuit   | 6 kilometres  | the lime kiln      | blasting         | fossils
    vineyard lane    | 8 kilometres  | the wine press     | the harvest      | the river bend
    glacier track    | 13 kilometres | the cable car      | hidden crevasses | blue ice
    hollow oak route | 5 kilometres  | the deer gate      | fallen branches  | a thousand-year oak
    salt marsh trail | 10 kilometres | the bird tower     | the spring tide  | grey seals
    """,
    unlisted=(
        "May I light a campfire by the lake?",
        "Is swimming allowed in the reservoir?",
        "Do I need a permit for mushrooms?",
        "Where is the nearest petrol station?",
        "Are there wolves in the valley?",
        "Can I fly a kite on the meadow?",
        "How much is a night at the hut?",
        "When was the park founded?",
        "Is there mobile coverage in the gorge?",
    ),
    asides=(
        "Carry your litter home.",
        "Fog can come up within minutes.",
        "Benches were repainted in March.",
        "Keep to the left on narrow parts.",
    ),
)

RECYCLING = Domain(
    role="recycling-line",
    subject="{e}",
    attributes=(
        Attribute(
            sources=(
                "Put {e} into {v}.",
                "Residents drop {e} in {v}.",
                "Since January {e} belong in {v}.",
            ),
            questions=(
                "Where do {e} go?",
                "Which bin is right for {e}?",
                "How do I get rid of {e}?",
            ),
            indirect="where {s} go",
            answers=("Put {e} in {v}.", "They go in {v}."),
            also="they go in {v}",
        ),
        Attribute(
            sources=(
                "The truck for {e} comes {v}.",
                "We collect {e} {v}.",
                "Kerbside pick-up of {e} is {v}.",
            ),
            questions=(
                "When are {e} collected?",
                "On which day do you pick up {e}?",
                "When should I put {e} on the kerb?",
            ),
            indirect="when {s} are collected",
            answers=("We collect {e} {v}.", "They are picked up {v}."),
            also="they are collected {v}",
        ),
        Attribute(
            sources=(
                "Please hand in {e} {v}.",
                "We accept {e} only {v}.",
                "Bring {e} {v}, or they stay behind.",
            ),
            questions=(
                "How should I prepare {e}?",
                "In what state do you take {e}?",
                "Do I have to do anything to {e} before handing them in?",
            ),
            indirect="how to hand in {s}",
            answers=("Hand in {e} {v}.", "They must be handed in {v}."),
            also="they are taken {v}",
        ),
        Attribute(
            sources=(
                "Old {e} are turned into {v}.",
                "A plant nearby makes {v} from {e}.",
                "Thanks to you, {e} become {v}.",
            ),
            questions=(
                "What happens to {e} afterwards?",
                "What are {e} recycled into?",
                "What do you make from {e}?",
            ),
            indirect="what {s} are turned into",
            answers=("Old {e} are turned into {v}.", "They become {v}."),
            also="they become {v}",
        ),
    ),
    table="""
    jam jars       | the green dome      | on the first Monday  | without lids       | new bottles
    milk cartons   | the yellow sack     | every other Friday   | rinsed and flat    | kitchen roll
    paint tins     | cage C              | twice a year         | completely dry     | steel beams
    hedge cuttings | the brown bin       | on Wednesdays        | tied in bundles    | mulch
    light bulbs    | the town hall box   | by appointment       | in their sleeves   | glass wool
    car tyres      | the depot yard      | each October         | off the rims       | gym mats
    wool jumpers   | the church bank     | on the last Thursday | in a closed bag    | felt
    phone chargers | the red crate       | every quarter        | with the cable cut | copper wire
    egg boxes      | the paper bin       | on Tuesdays          | free of food       | cardboard
    coffee pods    | the shop drop box   | on second Saturdays  | emptied            | park benches
    broken chairs  | the bulky waste bay | after a phone call   | in one piece       | chipboard
    cooking oils   | the orange drum     | on market days       | in a sealed bottle | bus fuel
    wine corks     | the school box      | at the end of term   | without wire       | floor tiles
    """,
    unlisted=(
        "Can I get a second compost bin?",
        "What is the fine for fly-tipping?",
        "Is the depot open on Easter Monday?",
        "Who empties the bins in the park?",
        "My bin lid is cracked. Do you replace it?",
        "Do you rent out skips?",
        "Why did my waste fee go up?",
        "Can I visit the sorting plant?",
        "Is there a repair cafe in town?",
    ),
    asides=(
        "Bins must be out by 6 in the morning.",
        "Snow can delay the trucks.",
        "Stickers for bins come by post.",
        "Keep lids closed against foxes.",
    ),
)

INSTRUMENTS = Domain(
    role="instrument-hire",
    subject="the {e}",
    attributes=(
        Attribute(
            sources=(
                "Hire of the {e} is {v}.",
                "The {e} rents for {v}.",
                "Students pay {v} for the {e}.",
            ),
            questions=(
                "How much is it to rent the {e}?",
                "What is the hire fee for the {e}?",
                "What would I pay for the {e}?",
            ),
            indirect="what {s} rents for",
            answers=("The {e} rents for {v}.", "You pay {v}."),
            also="it rents for {v}",
        ),
        Attribute(
            sources=(
                "The {e} may be kept for {v}.",
                "Bring the {e} back after {v}.",
                "Loans of the {e} run for {v}.",
            ),
            questions=(
                "How long can I keep the {e}?",
                "What is the loan period for the {e}?",
                "When must the {e} come back?",
            ),
            indirect="how long {s} may be kept",
            answers=("You may keep the {e} for {v}.", "The loan lasts {v}."),
            also="it may be kept for {v}",
        ),
        Attribute(
            sources=(
                "With the {e} you receive {v}.",
                "The {e} is handed out with {v}.",
                "Packed with the {e}: {v}.",
            ),
            questions=(
                "What comes with the {e}?",
                "Is anything included with the {e}?",
                "Which accessories do I get with the {e}?",
            ),
            indirect="what comes with {s}",
            answers=("The {e} comes with {v}.", "It includes {v}."),
            also="it comes with {v}",
        ),
        Attribute(
            sources=(
                "The {e} has {v}.",
                "Damage report for the {e}: {v}.",
                "Staff noted {v} on the {e}.",
            ),
            questions=(
                "Is there any damage on the {e}?",
                "What is wrong with the {e}?",
                "Does the {e} have any faults?",
            ),
            indirect="what is wrong with {s}",
            answers=("The {e} has {v}.", "There is {v}."),
            also="it has {v}",
        ),
    ),
    table="""
    alto recorder    | 2 francs a week   | one term      | a cleaning rod    | a chewed mouthpiece
    half-size cello  | 19 francs a month | a school year | a padded bag      | a scratch on the back
    button accordion | 25 francs a month | six months    | two straps        | a sticking key
    travel harp      | 33 francs a month | ten weeks     | a tuning lever    | a missing string
    baritone horn    | 15 francs a month | two years     | valve oil         | a dent in the bell
    bass clarinet    | 28 francs a month | eight months  | a box of reeds    | a worn cork
    snare drum       | 4 francs a week   | thirty days   | a pair of brushes | a loose clamp
    concert ukulele  | 1 franc a day     | the summer    | a chord chart     | a cracked peg
    oak psaltery     | 7 francs a week   | a weekend     | a felt cover      | a split corner
    pocket trumpet   | 12 francs a month | three months  | a mute            | a slow second valve
    stage piano      | 45 francs a month | one season    | a folding stand   | a dead pedal
    bowed saw        | 3 francs a week   | twenty days   | a leather guard   | a rust spot
    hurdy-gurdy      | 38 francs a month | a fortnight   | spare cotton      | a squeaky wheel
    """,
    unlisted=(
        "Do you offer singing lessons?",
        "Can I play in the youth orchestra?",
        "Where can I get my violin valued?",
        "Is there a practice room free tonight?",
        "Do you repair gramophones?",
        "When is the summer concert?",
        "Do I need insurance for school trips?",
        "Can two siblings share one contract?",
        "Who tunes the church organ?",
    ),
    asides=(
        "Cases are labelled in blue.",
        "Please loosen bows after playing.",
        "The store room is kept cool.",
        "Receipts are sent on paper.",
    ),
)

SANCTUARY = Domain(
    role="animal-sanctuary",
    subject="{e}",
    attributes=(
        Attribute(
            sources=(
                "Keepers feed {e} {v}.",
                "{e} eats nothing but {v}.",
                "Favourite food of {e}: {v}.",
            ),
            questions=(
                "What does {e} eat?",
                "What do you feed {e}?",
                "Could you tell us about the diet of {e}?",
            ),
            indirect="what {s} eats",
            answers=("{e} eats {v}.", "The diet is {v}."),
            also="the keepers offer {v}",
        ),
        Attribute(
            sources=(
                "{e} lives in {v}.",
                "The home of {e} is {v}.",
                "Since autumn {e} has stayed in {v}.",
            ),
            questions=(
                "Where does {e} live?",
                "Which enclosure is {e} in?",
                "Where can we visit {e}?",
            ),
            indirect="where {s} lives",
            answers=("{e} lives in {v}.", "The animal lives in {v}."),
            also="the place to visit is {v}",
        ),
        Attribute(
            sources=(
                "{e} was rescued from {v}.",
                "Volunteers brought {e} here from {v}.",
                "We took {e} in from {v}.",
            ),
            questions=(
                "Where was {e} before the sanctuary?",
                "What place did {e} come from?",
                "Where did you rescue {e}?",
            ),
            indirect="where {s} was rescued",
            answers=("{e} was rescued from {v}.", "The animal came from {v}."),
            also="the rescue was from {v}",
        ),
        Attribute(
            sources=(
                "{e} is {v} old.",
                "The vet puts the age of {e} at {v}.",
                "We think {e} has lived for {v}.",
            ),
            questions=(
                "How old is {e}?",
                "What age is {e}?",
                "Do you know the age of {e}?",
            ),
            indirect="how old {s} is",
            answers=("{e} is {v} old.", "The age is {v}."),
            also="the age is {v}",
        ),
    ),
    table="""
    Pepper the goat      | oat hay            | the lower barn   | a petrol station  | six years
    Duchess the tortoise | dandelion leaves   | the warm house   | a hotel lobby     | seventy years
    Bramble the fox      | eggs and mice      | the long run     | a garden shed     | three years
    Major the parrot     | nuts and mango     | the south aviary | a closed pub      | 41 years
    Tilly the donkey     | barley straw       | the hill paddock | a beach resort    | 19 years
    Smoke the owl        | day-old chicks     | the old dovecote | a grain silo      | eight months
    Otto the pig         | boiled potatoes    | the mud yard     | a city flat       | four years
    Nimbus the llama     | meadow grass       | the west field   | a bankrupt circus | eleven years
    Fig the fruit bat    | ripe bananas       | the dark room    | an airport crate  | two years
    Hazel the hedgehog   | beetles and kibble | pen 14           | a motorway verge  | ten weeks
    Captain the seal     | herring            | the tide pool    | a fishing net     | five months
    Juno the swan        | pondweed and corn  | the reed lake    | a frozen canal    | nine years
    Bolt the greyhound   | rice with chicken  | the kennel row   | a racing track    | five years
    """,
    unlisted=(
        "Can my school class adopt an animal?",
        "Do you take in injured pigeons?",
        "How do I become a volunteer?",
        "Are picnics allowed near the stables?",
        "Is there a webcam for the nests?",
        "What does your yearly vet bill come to?",
        "Where do I send old blankets?",
        "Do you breed rabbits for sale?",
        "Can we come with a pushchair?",
    ),
    asides=(
        "Please do not knock on the glass.",
        "Hay is delivered on the first of the month.",
        "Boots can be borrowed at the gate.",
        "The paths are steep behind the barn.",
    ),
)

DOMAINS = (
    GARDEN,
    LIBRARY,
    WORKSHOP,
    MUSEUM,
    FERRY,
    COOKING,
    LEISURE,
    BICYCLES,
    TRAILS,
    RECYCLING,
    INSTRUMENTS,
    SANCTUARY,
)
