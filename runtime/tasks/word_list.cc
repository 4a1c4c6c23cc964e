// See word_list.h.
#include "runtime/tasks/word_list.h"

namespace annulus {
namespace {

constexpr std::string_view kAdjectives[] = {
    "able",     "amber",    "ancient", "angry",   "autumn", "awake",  "bitter",  "blank",   "bold",   "brave",
    "brief",    "bright",   "broad",   "bronze",  "busy",   "calm",   "careful", "cheap",   "clean",  "clear",
    "clever",   "cloudy",   "cold",    "common",  "cool",   "coral",  "crisp",   "curious", "damp",   "dark",
    "deep",     "distant",  "double",  "dry",     "dull",   "dusty",  "eager",   "early",   "easy",   "empty",
    "even",     "faint",    "fair",    "famous",  "fancy",  "fast",   "final",   "fine",    "firm",   "flat",
    "fresh",    "friendly", "frosty",  "frozen",  "full",   "gentle", "giant",   "glad",    "golden", "grand",
    "grateful", "gray",     "great",   "green",   "happy",  "hard",   "heavy",   "hidden",  "hollow", "honest",
    "huge",     "humble",   "hungry",  "icy",     "idle",   "ivory",  "jolly",   "keen",    "kind",   "large",
    "late",     "lazy",     "level",   "light",   "little", "lively", "lonely",  "long",    "loud",   "lucky",
    "mellow",   "merry",    "mild",    "modern",  "modest", "muddy",  "narrow",  "neat",    "new",    "noble",
    "odd",      "old",      "orange",  "patient", "plain",  "polite", "proud",   "purple",  "quick",  "quiet",
    "rapid",    "rare",     "red",     "rich",    "rough",  "round",  "royal",   "rusty",   "salty",  "secret",
    "shallow",  "sharp",    "shiny",   "short",   "shy",    "silent", "silver",  "simple"};

constexpr std::string_view kNouns[] = {
    "acorn",  "anchor",  "apple",    "arch",    "arrow",  "badge",  "banjo",   "barn",   "basket",   "beach",
    "bell",   "bench",   "berry",    "blanket", "boat",   "book",   "bottle",  "bowl",   "branch",   "bread",
    "brick",  "bridge",  "brush",    "bucket",  "cabin",  "candle", "canoe",   "carpet", "castle",   "chair",
    "cherry", "circle",  "clock",    "cloud",   "coat",   "coin",   "compass", "copper", "corner",   "cottage",
    "cradle", "creek",   "crown",    "curtain", "desert", "desk",   "door",    "drum",   "eagle",    "engine",
    "falcon", "feather", "fence",    "field",   "flag",   "flower", "forest",  "fork",   "fountain", "fox",
    "garden", "gate",    "glove",    "grape",   "guitar", "hammer", "harbor",  "hat",    "hill",     "honey",
    "horse",  "house",   "island",   "jacket",  "jar",    "kettle", "key",     "kite",   "ladder",   "lake",
    "lamp",   "lantern", "leaf",     "lemon",   "letter", "lion",   "map",     "maple",  "market",   "meadow",
    "mirror", "moon",    "mountain", "needle",  "nest",   "ocean",  "oven",    "owl",    "paddle",   "palace",
    "pencil", "pepper",  "piano",    "pillow",  "planet", "pocket", "pond",    "rabbit", "river",    "road",
    "rocket", "roof",    "rope",     "sail",    "saddle", "school", "shell",   "ship",   "shoe",     "spoon",
    "star",   "stone",   "stove",    "table",   "tiger",  "tower",  "train",   "tree"};

}  // namespace

std::span<const std::string_view> adjectives() { return kAdjectives; }
std::span<const std::string_view> nouns() { return kNouns; }

}  // namespace annulus
