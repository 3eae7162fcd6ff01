"""The phrases that prompts are put together from. Data only; prompts.py draws from it.

Topics fill ``{topic}`` and ``{other}`` (``{Topic}``: with a capital). HELD_OUT_TOPICS never reach
a training row, so that figures on held-out rows do not reward having seen the topic.
"""

from __future__ import annotations


def _items(text: str, separator: str) -> tuple[str, ...]:
    """The parts of a wrapped text between separators, each on one line."""
    return tuple(" ".join(part.split()) for part in text.split(separator))


def _lines(text: str) -> tuple[str, ...]:
    """The lines of a text, without the empty ones at its ends."""
    return tuple(text.strip("\n").split("\n"))


TOPICS = _items(
    """
    rainforests; the American Civil War; the human lungs; comets; composting; basketball; anxiety;
    the Ottoman Empire; salsa dancing; the Higgs boson; cheese making; map reading; dolphins;
    hurricanes; personal finance; wedding planning; the Magna Carta; blockchain; pottery; caffeine;
    the Great Depression; table manners; spiders; the Nile; machine translation; the lymphatic
    system; film noir; hydroelectric dams; kites; public health; acids and bases; the piano; the
    Suez Canal; tomato plants; wolves; freelancing; the Mongol Empire; time zones; honeybees; colour
    theory; renewable energy; curling; the human eye; tax returns; the Sahara; crosswords; ghost
    stories; web browsers; volcanology; first aid; pasta; the Berlin Wall; parrots; topology;
    apprenticeships; the Big Bang; sign language; sailing; recursion; hospitality; Mars; jealousy;
    the Meiji Restoration; pickling vegetables; tropical storms; debate clubs; the kidneys; jigsaw
    puzzles; salmon; the British Parliament; watercolours; sorting algorithms; a broken clock; horse
    riding; peer pressure; the Maya; mushrooms; airports at dawn; radio; fractions; badgers; street
    markets; the Treaty of Versailles; dental care; camping; entropy; garden birds; the cello; the
    gig economy; winter; vitamins; ballet; semiconductors; foxes; gratitude; school uniforms; the
    Inca roads; digital cameras; waste water treatment; fairy tales; rugby; the Milky Way;
    handwriting; labour unions; tea ceremonies; genetics; submarines; neighbours; a haunted house;
    the Enlightenment; road safety; squirrels; fusion power; stand-up comedy; bamboo; spreadsheets;
    the liver; skiing; the gold standard; lullabies; moss; second-hand shops; the Byzantine Empire;
    meditation; cargo bikes; probability puzzles; whisky; jellyfish; job applications; the Moon;
    concrete; family reunions; the Phoenicians; photosynthetic bacteria; karate; water conservation;
    encryption; a lonely robot; rice; the Panama Canal; sleepwalking; rock climbing; insulin; owning
    a rabbit; the Baroque; tides; public parks; phishing emails; laughter; microscopes; the Maori;
    bread ovens; marketing; thunderstorms; search engines; turtles; patience; the Apollo programme;
    breakfast; vertical farming; fables; the skeleton; diplomacy; snow; folk music; a dragon who
    cannot fly; antique furniture; statistics; zebras; carpooling; the Bronze Age; hand tools;
    mountain villages; contact lenses; the European Union; lemonade; code review; crocodiles;
    retirement; an old map; vaccination campaigns; soap; badminton; the water table; city cycling;
    optical illusions; homework; the harp; moths; forgiveness; volcanic islands; satellites
    """,
    ";",
)

HELD_OUT_TOPICS = _items(
    """
    lynxes; the telegraph; rye bread; geothermal heating; the Khmer Empire; museums at night;
    cargo ports; rowing; cacti; the clarinet; bicycle repair; fog; prime numbers; puffins; tutoring;
    a clockmaker's daughter
    """,
    ";",
)

TOPIC_REQUESTS = _lines("""
What can you tell me about {topic}?
Explain {topic} to someone who has never heard of it.
Give a short introduction to {topic}.
In two or three sentences, what is {topic} about?
Write a story of about 200 words on {topic}.
Write a four-line poem on {topic}.
Write a haiku inspired by {topic}.
List seven interesting facts related to {topic}.
What are the pros and cons of {topic}?
Why do people care about {topic}?
Explain {topic} the way you would to a child.
Write an essay with an introduction, body and conclusion on {topic}.
What mistakes do people make when it comes to {topic}?
Share four practical tips concerning {topic}.
Summarise the main ideas behind {topic}.
Write the opening paragraph of a blog article on {topic}.
Plan a one-hour lesson on {topic}.
Which questions do beginners usually have about {topic}?
How does {topic} compare to {other}?
What do {topic} and {other} have in common?
Write a conversation between a teacher and a student about {topic}.
Prepare a multiple-choice quiz on {topic}, with the answers.
Draft an outline for a talk on {topic}.
Propose eight headlines for a magazine piece on {topic}.
Give me a brief history of {topic}.
Write a polite email asking a coworker for information on {topic}.
Hey, I just got curious about {topic}. Any good starting points?
I need help with a school project on {topic}. What should I include?
Write an advertisement that mentions {topic}.
Provide a beginner's guide to {topic} in numbered steps.
Make a glossary of terms used around {topic}.
Write a postcard to my sister that mentions {topic}.
Write a fictional news report on {topic}.
How might {topic} change over the next fifty years?
Argue for and against {topic}.
Write a funny rhyme with {topic} in it.
Help me brainstorm activities around {topic}.
What is the link between {topic} and {other}?
Write a scene for a play in which {topic} comes up.
Suggest games for kids that involve {topic}.
Write a two-minute speech on {topic}.
Is {topic} worth learning about? Yes or no, and why.
Who are some people known for {topic}?
Do you know a good joke about {topic}?
What surprises most people about {topic}?
Convince me that {topic} is important.
Write a tweet about {topic}.
Define {topic} and then use it in a sentence.
Put the differences between {topic} and {other} in a table.
Write the chorus of a song on {topic}.
Imagine a world without {topic}. What would it look like?
Design a weekly plan for a person learning about {topic}.
What is it like to work in a field connected to {topic}?
What problems are linked to {topic}, and how could they be solved?
Rate {topic} out of ten and justify the score.
""")

CODE_TASKS = _lines("""
adds up all even numbers in a list
tells whether a year is a leap year
finds the smallest prime factor of an integer
prints the first n triangular numbers
sorts strings by their length
counts the lines of every file in a directory
returns the minimum and the maximum of a list
removes all punctuation from a string
interleaves two lists
tests whether two words are anagrams
converts kilometres to miles
computes the least common multiple of two numbers
splits a list into chunks of a given size
reads a JSON file and prints its keys
searches a sorted array for a value
implements a linked list
implements a priority queue
counts how often each word occurs in a text
rotates a matrix by ninety degrees
computes the dot product of two vectors
checks that brackets in a string are balanced
makes a random nickname
groups people by their age
capitalises each word of a sentence
converts a decimal number to binary
implements insertion sort
implements merge sort
measures the depth of a binary tree
computes the number of days between two dates
sends a GET request and prints the status code
finds duplicate files in a folder
works out the monthly payment of a loan
approximates pi by random sampling
returns the median of a list
draws a triangle of stars
implements a shopping cart class
shuffles a deck of cards
encodes a message with a Caesar cipher
finds the longest common prefix of some strings
caches the results of a slow function
""")

CODE_REQUESTS = _lines("""
Write Python code that {task}.
Show me a Python function that {task}.
Write a JavaScript function that {task}.
How would I write a C++ function that {task}?
Write a Rust function that {task} and explain each line.
I need a small Go program that {task}.
Write a documented Python function that {task}, followed by two test cases.
Walk me through the design of a function that {task}.
Write pseudocode for an algorithm that {task}.
Write a Java class with a method that {task}.
""")

SENTENCES = _lines("""
The library closes early on Fridays because of the staff meeting.
Could we please have the bill and two more coffees?
She don't likes the soup that her mother cook.
We regret to inform you that your flight has been delayed by three hours.
Where you was born and how old is you?
A gentle breeze carried the smell of bread across the square.
Him and I has went to the cinema last weekend.
I am writing to ask whether the position is still open.
Last summer we was traveling trough Italy by train.
The patient should take one tablet after each meal for ten days.
Is there a pharmacy near the railway station?
The deadline for the essay has been extended until next Tuesday.
My grandmother taught me how to knit when I was seven years old.
Despite the heavy snow, every guest arrived on time.
The little boat drifted slowly down the river at dusk.
Please remember to switch off the lights when you leave.
The show was kind of boring and kind of long and we kind of left early.
Its to bad that you're car wont start.
The museum is free for children under twelve.
Plants need light, water and air in order to grow.
""")

SENTENCE_REQUESTS = _lines("""
Translate into French: {sentence}
How do you say this in Spanish? "{sentence}"
Please translate this into German: {sentence}
Put this into Italian: {sentence}
Fix any mistakes in this sentence: {sentence}
Make the following sentence sound more formal: {sentence}
Rewrite this so that it sounds warmer: {sentence}
Shorten this sentence: {sentence}
Say the same thing in other words: {sentence}
Which words in this sentence are verbs? {sentence}
Does this text sound happy, unhappy or neutral? "{sentence}"
Write the next two sentences: {sentence}
Rewrite this as a question: {sentence}
What is this sentence about? {sentence}
""")

PASSAGES = _items(
    """
    Sea otters live along the coasts of the northern Pacific. They eat sea urchins, which would
    otherwise graze kelp forests down to bare rock. Where otters were hunted out, the kelp
    disappeared; where they have come back, it has often recovered, along with the fish that
    shelter in it. |
    In 1854 the physician John Snow marked deaths from cholera on a map of London and saw that they
    clustered around one water pump. He persuaded the local officials to remove its handle. It took
    decades more until most doctors accepted that the disease spread through water. |
    The school board has decided to start lessons half an hour later from September. Teachers hope
    that pupils will be more awake in the first lesson. Some parents object that they will have to
    leave for work before their children leave home, and ask for supervised breakfasts. |
    Drinking enough water helps the body to keep its temperature, carry nutrients and protect the
    joints. How much a person needs depends on size, activity and weather. Thirst is a good guide
    for healthy adults, while older people may have to remind themselves. |
    Jonas repaired radios in his father's garage before he could read. At nineteen he opened a shop,
    which failed within a year. The second one did better, because he listened: customers did not
    want new devices, they wanted the old ones to work. Today four of his apprentices run their own
    workshops. |
    Permafrost is ground that stays frozen for at least two years in a row. It covers about a
    quarter of the land in the northern hemisphere. When it thaws, buildings sink, roads buckle,
    and plant remains that were locked in ice for thousands of years begin to rot and give off
    carbon dioxide and methane. |
    The kitchen will be closed on Monday and Tuesday while the new oven is put in. Lunch will be
    served in the garden if the weather is dry, otherwise in room 12. Please tell Maya by Friday if
    you need a vegetarian meal; the list on the door is no longer in use. |
    A lever is a rigid bar that turns about a fixed point. Pushing down on the long end lifts a
    heavy load on the short end, at the price of moving the hand further than the load moves.
    Scissors, wheelbarrows and bottle openers all work on this principle.
    """,
    "|",
)

PASSAGE_REQUESTS = (
    "Summarise this passage:\n\n{passage}",
    "Give a one-sentence summary of the text below.\n{passage}",
    "{passage}\n\nWhat point is the author making?",
    "Rewrite this in simpler words:\n\n{passage}",
    "Turn this text into a list of bullet points:\n\n{passage}",
    "Write four comprehension questions on this text.\n\n{passage}",
    "Suggest a headline for the following text:\n\n{passage}",
    "Below is a text. Summarise it briefly and keep to what matters most.\n\n{passage}",
    "Who or what is this text about?\n\n{passage}",
)

OTHER_REQUESTS = _lines("""
Hi there!
Good morning.
How are you doing?
What is your name?
What are you good at?
What is the capital of Japan?
What is the capital of Canada?
Who painted the Starry Night?
How many legs does a spider have?
What is the longest river in the world?
What makes people happy?
Make me laugh.
Tell me a story with a happy ending.
How do I make an omelette?
Give me a recipe for tomato soup.
What can I cook with rice and eggs?
Plan a day in Barcelona.
Plan a camping trip for four people.
Which books should I read this summer?
How do I iron a shirt?
How can I improve my spelling?
I had a bad day.
I am nervous about my exam. Any advice?
Write a cover letter for a job as a nurse.
Write a note to thank my neighbour.
Write a complaint about a broken washing machine.
What should I give my father for his birthday?
What is the difference between weather and climate?
What is the difference between a for loop and a while loop?
What does CPU stand for?
How does a microwave oven work?
How do boats float?
Why do leaves change colour?
Why do cats purr?
How long should I cook pasta?
What is seven times eight?
Name the oceans.
List the months that have thirty days.
Name six fruits that are red.
What colours do you get by mixing blue and yellow?
Who was Isaac Newton?
Who was Cleopatra?
How do I update pip?
Explain pointers.
What is a database index?
What is Docker?
How do I make text bold in HTML?
Write a regular expression for a date.
Write a shell command that counts the files in a folder.
What stretches should I do after running?
How can I learn to save?
Write a dialogue between the sun and the moon.
Talk like a knight and introduce yourself.
You are a museum guide. Welcome the visitors.
Write a toast for a wedding.
What is time?
How do batteries work?
Could you help me write an essay?
What happened in 1989?
Convert 20 degrees Celsius to Fahrenheit.
What day is it today?
""")

TEXT_OPENERS = (
    "Long ago, in a kingdom by the sea,",
    "It all began when",
    "The story of {topic} starts",
    "{Topic} has",
    "{Topic} are",
    "This guide explains {topic}",
    "One of the first things to know about {topic} is",
    "def is_even(n):",
    "def main():\n    ",
    "import math\n",
    "import json\nfrom pathlib import Path\n\n",
    "class Dog:\n    def __init__(self, name):",
    "while True:\n",
    "# {Topic}\n\n",
    "## Overview\n\n{Topic}",
    "Dear Mrs Miller,\n\n",
    "The largest city in Germany is",
    "The rain had stopped, and",
    "Nobody in the village knew why",
    "By the end of the century,",
    "Researchers at the university have",
    "People often ask whether {topic}",
    "Question: How does {topic} work?\nAnswer:",
    "Q: What should I know about {topic}?\nA:",
    "1. {Topic}\n2. {Other}\n3.",
    "Chapter One\n\n",
    "In this lesson, students will learn about {topic}.",
    "Why {topic}?\n\n",
    "Abstract\n\nWe investigate {topic}",
    "Ingredients:\n- 3 eggs\n- ",
    "Below is a discussion of {topic} and {other}.\n\n",
    "When I was a child,",
    "Recent surveys suggest that {topic}",
    "As for {topic},",
    "Here are",
    "A",
    "It",
    "At",
    "However,",
    "Anyone interested in {topic} should",
    "SELECT COUNT(*) FROM",
    '<div class="',
    "#include <stdio.h>\n",
    "const ",
    "Four score and seven years ago",
    "It was the best of times,",
    "Suppose that f is a continuous function",
    "Tom: Good morning!\nAnna:",
    "Subject: {Topic}\n\n",
    "{Topic}: What You Need to Know\n\n",
    "This week's column is about {topic}.",
)

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OTHER_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a cheerful assistant. Keep your answers short.",
    None,
)
