"""The sentences of the stories: openings, character, ten plots, morals, closings.  Data; `stories.py` tells them.

Slots: {name} {kind} {adj} {he} {him} {his} are the hero's, {fname} {fkind} {fadj} {fhe} {fhim} {fhis} the friend's;
{place} {spot} {spot2} {spot3} say where, {thing} {thing2} {food} {build} {skill} {fear} {worker} say what.
A sentence may start with a slot or a small letter: capitals and "a"/"an" are put right when it is told.
"""

OPENINGS = (
    "Once upon a time, there was a {adj} {kind} [named|called] {name}. [{name}|{he}] lived {place}.",
    "Once upon a time, a {adj} {kind} [named|called] {name} lived {place}.",
    "Once upon a time, {place}, there lived a {adj} {kind}. {his} name was {name}.",
    "The {adj} {kind} [was called {name}|had a short name: {name}]. {he} lived {place}.",
    "The {adj} {kind} lived {place}. [everyone called {him} {name}|{his} name was {name}].",
    "{name} was a {adj} {kind} who lived {place}.",
    "{name} the {kind} lived {place}. {he} was a {adj} {kind}.",
    "There was once a {adj} {kind} named {name}, who lived {place}.",
    "Long ago, a {adj} {kind} named {name} [lived|had a home] {place}.",
    "One [morning|day|evening], a {adj} {kind} named {name} looked out of the window. {he} lived {place}.",
    "{place}, there lived a {adj} {kind} named {name}.",
    "A {adj} {kind} lived {place}. {his} name was {name}.",
    "It was a {weather} day {place}. A {adj} {kind} named {name} [sat by the window|opened the door|went outside].",
    "This is the story of {name}, a {adj} {kind} who lived {place}.",
    "In the {season}, a {adj} {kind} named {name} came to live {place}.",
)

TRAITS = (
    "{he} liked [to sing in the rain|to count the stars|to read by the fire|to ask questions|long walks|quiet mornings].",
    "every [morning|evening], {he} [watered the flowers|swept the floor|fed the birds|listened to the wind].",
    "more than anything, {he} loved {his} {thing2}.",
    "{his} best friend was a {fadj} {fkind} named {fname}.",
    "{he} had a {thing2} and [a big heart|many ideas|no fear of work|a very good memory].",
    "people said that {he} [never gave up|always told the truth|had the kindest eyes|could fix anything].",
    "{he} was never in a hurry, [and {he} saw many things that others did not|for there was so much to see].",
)

LINKS = (
    "the next day,", "a week later,", "not long after that,", "the next morning,", "one {season} later,", "soon after that,",
)  # fmt: skip

_LOST = (
    (
        "one {weather} [morning|day], {name} could not find {his} {thing}.",
        "one [morning|evening], {his} {thing} was gone.",
        "one day, {name} lost {his} {thing}.",
    ),
    (
        "{he} looked {spot}, but it was not there. {he} looked {spot2}, but it was not there either.",
        "first {he} looked {spot}. then {he} looked {spot2}. there was [no {thing}|nothing] at all.",
        "{he} searched {spot} and {spot2}, and found only [dust|an old shoe|a sleeping cat|three feathers].",
    ),
    (
        '"have you seen my {thing}?" {he} asked {fname} the {fkind}.',
        'on the way {he} met {fname}, a {fadj} {fkind}. "why are you so sad?" asked {fname}. "I lost my {thing}," said {name}.',
        "{name} sat down and began to cry. a {fadj} {fkind} named {fname} heard {him}.",
    ),
    (
        '"let us look together," said {fname}. "four eyes are better than two."',
        '"no," said {fname}, "but I will help you look."',
        '"think back," said {fname}. "where were you yesterday?"',
    ),
    (
        "they walked [all afternoon|for hours], and at last they saw something [shine|move] {spot3}.",
        "they followed the small tracks on the ground until they came to a place {spot3}.",
        "then {name} remembered: yesterday {he} had been {spot3}.",
    ),
    (
        "it was the {thing}! {name} [laughed|jumped for joy|hugged {fname}].",
        "there lay the {thing}, safe and dry. {name} thanked {fname} [with all {his} heart|many times].",
        "a bird had carried the {thing} to its nest. {name} gave it a ribbon, and the bird gave the {thing} back.",
    ),
)

_RESCUE = (
    (
        "one {weather} day, {name} heard a small voice {spot}.",
        "one [day|evening], {name} was walking home when someone called for help {spot}.",
        "on a {weather} [morning|afternoon], {name} found a {fadj} {fkind} {spot}.",
    ),
    (
        'it was {fname} the {fkind}. "please help me," said {fname}. "I am stuck and I can not get out."',
        'a {fadj} {fkind} named {fname} was sitting there. "I am lost," {fhe} said. "I do not know the way home."',
        "it was {fname}, a {fadj} {fkind}. {fhe} was cold and hungry, and {fhe} had hurt {fhis} foot.",
    ),
    (
        "{name} did not wait. {he} ran home and came back with a {thing} and some {food}.",
        '"do not worry," said {name}. "I have a {thing}, and I have an idea."',
        "{name} thought for a moment. then {he} took {his} {thing} and went to work.",
    ),
    (
        "it took a long time, but {he} did not give up.",
        "they tried once, they tried twice, and the third time it worked.",
        "slowly, step by step, {name} and {fname} found a way.",
    ),
    (
        '"thank you," said {fname}. "one day I will help you too." {name} only smiled.',
        "when the moon came up, {fname} was safe at home, and {fhis} mother cried for joy.",
        "{fname} was free at last, and the two of them shared the {food}.",
    ),
    (
        "many days later, {name} fell into the river. who pulled {him} out? it was {fname}!",
        "from that day on, {name} and {fname} were friends.",
        "in the {season}, when {name} was in trouble, {fname} came at once, for {fhe} had not forgotten.",
    ),
)

_BUILD = (
    (
        "one {weather} day, {name} decided to build a {build}.",
        '"I want to build a {build}," said {name} one [morning|evening].',
        "{name} had a dream: {he} wanted to make a {build} with {his} own hands.",
    ),
    (
        "{he} collected wood, nails and rope, and worked from morning to night.",
        "{he} drew a plan on a large piece of paper and found {count} old boards {spot}.",
        "{he} asked the {worker} for tools, and the {worker} gave {him} a hammer and a saw.",
    ),
    (
        "but the first {build} broke on the very first day.",
        "but when {he} tried it, there was a loud crack, and the {build} fell apart.",
        "the first try was crooked, and everyone laughed.",
    ),
    (
        '"it is all right," said {fname} the {fkind}. "every mistake is a teacher."',
        "{name} was sad, but {fname}, a {fadj} {fkind}, said that {he} should try again.",
        'a {fadj} {fkind} named {fname} looked at the broken pieces. "this part is too thin," said {fname}. "make it stronger."',
    ),
    (
        "so {name} started again. this time {he} measured everything twice.",
        "together they built it again, and this time they took their time.",
        "{name} [slept well|drank some tea] and began once more, slowly and with care.",
    ),
    (
        "after {count} days, the new {build} was ready, and it was beautiful.",
        "when the {build} was finished, the whole village came to see it.",
        "the second {build} was strong and fine. {name} was so proud that {he} danced.",
    ),
)

_JOURNEY = (
    (
        "one {weather} [morning|day], {name} found a {thing} {spot}. a note was tied to it.",
        "one [night|evening], {name} saw a strange light {spot}.",
        "one day, {name} found a small door {spot}. {he} had never seen it before.",
    ),
    (
        '"I wonder where it leads," said {name}. {he} packed some {food} and {his} {thing2}, and off {he} went.',
        "{he} called {his} friend {fname} the {fkind}, and they set out together at once.",
        "{name} was a little afraid, but {he} was even more curious. so {he} went to see.",
    ),
    (
        "the path went over a bridge, through a dark wood and up a steep hill.",
        "{he} walked past {count} trees, across a field of yellow flowers and along a narrow stream.",
        "the way was long. the sun went down, the stars came out, and the wind sang in the grass.",
    ),
    (
        'on the way {he} met a {worker}. "go left at the big rock," said the {worker}, "and do not look back."',
        "at the crossroads stood an old sign, but nobody could read it. {name} listened, and chose the road where birds were singing.",
        "twice {he} lost the way, and twice {he} found it again.",
    ),
    (
        "at last {name} came to a garden that nobody had seen for a hundred years.",
        "at the end of the way there was a cave full of shining stones.",
        "behind the last hill lay a lake as clear as glass, and in the middle stood a tower.",
    ),
    (
        "{he} took only one small stone to remember it by, and went home happy.",
        "{name} stayed until the sun came up. then {he} walked home and told everyone the story.",
        '"the best part was the way," said {name}, when {he} was home again.',
    ),
)

_BRAVE = (
    (
        "{name} had a secret: {he} was afraid of {fear}.",
        "there was only one thing {name} did not like, and that was {fear}.",
        "everybody thought that {name} was not afraid of anything. but {he} was afraid of {fear}.",
    ),
    (
        "one {weather} night, {fname} the {fkind} did not come home, and it grew late.",
        "one day, {fname}, a {fadj} {fkind}, [needed help|was in trouble] {spot2}, and nobody else was near.",
        "one evening, there was bad news: {fname}, a {fadj} {fkind}, was lost {spot2}.",
    ),
    (
        "{name} wanted to hide under the blanket. {his} heart beat like a drum.",
        "{his} knees were shaking, and {he} could hardly speak.",
        '"I can not do it," thought {name}. "I am too small."',
    ),
    (
        "but then {he} thought of {fname}, and {he} took {his} {thing} and went out.",
        'but {he} took a deep breath and counted to ten. "one step," {he} said, "and then one more."',
        "but a friend is a friend. {name} held {his} {thing} tight and began to walk.",
    ),
    (
        "it was not as bad as {he} had thought. {he} even began to hum a song.",
        "the longer {he} walked, the smaller {his} fear became.",
        "{fear} was still there, but {name} went on anyway.",
    ),
    (
        '{spot2}, {he} found {fname}. "you came!" said {fname}. "you are the bravest {kind} I know."',
        "soon everyone was safe. {name} had been afraid, and {he} had done it all the same.",
        "that night {name} slept very well. {he} was never so afraid of {fear} again.",
    ),
)

_SHARE = (
    (
        "one {weather} day, {name} [made|bought] some {food}. the whole house smelled wonderful.",
        "in the {season} there was little to eat, but {name} still had some {food}.",
        "one [morning|evening], {name} was about to eat {his} {food} when somebody knocked at the door.",
    ),
    (
        "first came a {worker}, who had not eaten all day. {name} gave him a piece.",
        '"may I have a little?" asked {fname} the {fkind}. "of course," said {name}.',
        "a {fadj} {fkind} named {fname} stood outside in the cold. {name} asked {fhim} to come in.",
    ),
    (
        "then came {count} mice, and they were hungry too.",
        "then came an old woman with a basket, and she sat down by the fire.",
        "soon there were {count} guests around the table.",
    ),
    (
        "when everyone had eaten, there was nothing left for {name}.",
        "{name} cut the last piece in two, and then in two again.",
        '"there is not enough," whispered {name}, but {he} gave it away all the same.',
    ),
    (
        "but the guests came back. one brought butter, one brought tea, and one brought a song.",
        'then {fname} laughed. "wait here," {fhe} said, and came back with a full basket.',
        "a {worker} stood up and opened a big sack. it was full of {food}.",
    ),
    (
        "they ate and sang until late, and nobody was hungry.",
        "it was the best supper that {name} ever had.",
        "from then on, they ate together every {season}.",
    ),
)

_RACE = (
    (
        "one day there was a great race, and {fname} the {fkind} was sure to win it.",
        "every {season} there was a race from the well to the old bridge. {fname}, a {fadj} {fkind}, had won it twice.",
        '"I am the fastest of all," said {fname} the {fkind}. "nobody can beat me."',
    ),
    (
        "{name} was not fast, but {he} wanted to try.",
        '"I will run with you," said {name}, and everyone was surprised.',
        "{name} practised every morning for {count} days.",
    ),
    (
        "at the start, {fname} ran so fast that nobody could see {fhim} any more.",
        "the bell rang. {fname} was far ahead after the first turn.",
        "they started at noon. {fname} took the lead and laughed.",
    ),
    (
        "but {fname} stopped to [rest|pick flowers|eat some {food}] {spot}, and soon {fhe} was asleep.",
        "but then {fname} took the wrong way and got lost {spot}.",
        "but {fname} slipped on a wet stone and fell into the mud.",
    ),
    (
        "{name} did not stop. step by step, {he} went on.",
        "{name} came by. {he} could have run past. but {he} stopped and helped {fname} up.",
        '{name} saw it and waited. "come," {he} said, "let us run together."',
    ),
    (
        "in the end, they crossed the line side by side, and both of them won.",
        "{name} was not the fastest that day, but everyone cheered for {him}.",
        "when the sun went down, {name} held the {thing} that was the prize, and gave it to {fname}.",
    ),
)

_GARDEN = (
    (
        "one {weather} day, {name} found a tiny seed {spot}.",
        "in the spring, an old {worker} gave {name} a tiny seed.",
        "one morning, the wind carried a tiny seed to the window of {name}.",
    ),
    (
        "{he} put it into the ground and gave it water every day.",
        "{he} planted it {spot2}, where the sun was warm.",
        "{he} made a small hole, put the seed in and covered it with earth.",
    ),
    (
        "the first week nothing happened. the second week nothing happened.",
        "{he} waited and waited, but there was nothing to see.",
        '"it will never grow," said {fname} the {fkind}.',
    ),
    (
        '"be patient," said {fname}, a {fadj} {fkind}. "good things are slow."',
        "but {name} still came every day, and {he} told the seed a story.",
        "{name} built a little fence so that nobody would step on it.",
    ),
    (
        "then, after the rain, a green leaf came up.",
        "one morning there was a small green point in the brown earth.",
        "at last something moved, and two leaves opened like hands.",
    ),
    (
        "by the {season} it was a tall tree, and the birds built nests in it.",
        "it became the most beautiful flower that anyone had seen, as blue as the sky.",
        "when it was grown, it carried so many apples that {name} gave one to everybody.",
    ),
)

_LEARN = (
    (
        "{name} wanted to learn to {skill}, but {he} did not know how.",
        "one day, {name} saw a {worker} who could {skill}. {name} wanted to do it too.",
        '"I wish I could {skill}," said {name}.',
    ),
    (
        "{he} tried alone, but it went wrong every time.",
        "the first day was hard, and the second day was harder.",
        "{he} read a big book about it, but a book was not enough.",
    ),
    (
        'then {he} met {fname}, a {fadj} {fkind}. "I can teach you," said {fname}.',
        "so {he} went to {fname} the {fkind}, who knew a lot about it.",
        '"show me," said {fname} the {fkind}. {fhe} watched and did not laugh.',
    ),
    (
        '"do not think of the end," said {fname}. "think of the next small step."',
        '"listen first," said {fname}. "then try."',
        '"again," said {fname}, and {name} tried again. "again," said {fname}, and {name} tried again.',
    ),
    (
        "they practised [every day|each evening] {spot}, in rain and in sun.",
        "after {count} weeks, it was a little better. after {count} more, it was good.",
        "one evening, without thinking, {name} did it, and {fname} clapped.",
    ),
    (
        "now {name} could {skill}, and {he} taught {count} others to do the same.",
        "at the great feast, everyone asked {name} to show what {he} could do, and {he} was not shy at all.",
        '"you are a good teacher," said {name}. "you are a good pupil," said {fname}.',
    ),
)

_LIBRARY = (
    (
        "{name} worked in a library. long stories were kept there in small boxes.",
        "one day, {name} got a new job: {he} had to store all the letters of the village in small boxes.",
        "the {worker} had too many pages and too few shelves, so {name} came to help.",
    ),
    (
        "at first, {name} kept a whole shelf free for every story, and soon the library was full of empty space.",
        "at first, all pages of a story had to lie side by side, and soon there was no room left.",
        "at first, nobody knew how long a story would be, so every story got too much room.",
    ),
    (
        "then {he} had an idea. the pages of a story did not have to lie side by side.",
        'then {fname} the {fkind} said: "Use any free box, and write down which one you took."',
        '"why not use any box that is free?" asked {fname}, a {fadj} {fkind}.',
    ),
    (
        "so {name} made a table. for each page it said which box to open.",
        "so {he} wrote a list for every story: the first part is in box nine, the next part is in box two.",
        "so {name} put the pages into any free box and kept a table of the numbers.",
    ),
    (
        "when a story grew, it got one more box. when it was over, its boxes were free again.",
        "when two stories had the same first page, they shared one box, and {name} only counted the readers.",
        "when the boxes ran out, the last story to come had to wait, and nobody was angry.",
    ),
    (
        "now {count} times as many stories fit into the library, and {name} was very proud.",
        "almost no room was lost, and the readers were happy.",
        '"it is so simple," said {fname}. "yes," said {name}, "now it is."',
    ),
)

PLOTS = (_LOST, _RESCUE, _BUILD, _JOURNEY, _BRAVE, _SHARE, _RACE, _GARDEN, _LEARN, _LIBRARY)

MORALS = (
    "{name} learned that [it is good to ask for help|small steps go far|a true friend is worth more than gold].",
    "and {name} knew that [kindness always comes back|it is never too late to try|nobody is too small to help].",
    "that evening, {name} [sat by the fire and smiled|wrote it all down in a little book|looked at the stars for a long time].",
    "{name} and {fname} [told the story again and again|sat {spot} and watched the sun go down|laughed about it for years].",
    "when {name} went to bed, {he} was tired and happy.",
)

CLOSINGS = (
    "the end.", "the end.", "and they lived happily ever after.", "and that was that.",
    "and if you go there, you can still hear people talk about it.", "it had been a good day.",
)  # fmt: skip

REQUESTS = (
    "[Tell|Write] me a [|short ]story about a {kind}.",
    "[Tell|Write] me a [|short ]story about a {adj} {kind}[|, please].",
    "Tell a story about {name} the {kind}.",
    "[Please tell|Can you tell] me a story about a {kind} named {name}?",
    "I would like to hear a story about a {kind} and a {fkind}.",
)
