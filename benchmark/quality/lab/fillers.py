"""Contexts of three passages each, as neutral as the server's own filler, to take means over."""

from __future__ import annotations

from chunk_cache.prompt.filler import FILLER

FILLERS: tuple[str, ...] = (
    FILLER,
    "Bicycle chain\nA bicycle chain carries the force of the pedals to the rear wheel. It is a row of links "
    "joined by pins, and it bends around the toothed rings at both ends. Dust and rain wear it out, so riders "
    "clean it and put oil on it. A worn chain becomes longer than it was and begins to slip. Replacing it early "
    "is cheaper than replacing the rings as well.\n\nHoney bee\nHoney bees live in colonies with one queen and "
    "many workers. The workers gather nectar from flowers and bring it home, where it is dried into honey and "
    "kept in cells of wax. A bee that has found good flowers tells the others by a dance that shows direction "
    "and distance. In the cold season the colony forms a cluster and lives on what it has stored.\n\nTheatre "
    "stage\nA stage is the part of a theatre on which actors perform. Curtains hide it between scenes, and lamps "
    "above it change the mood from day to night. Painted scenery is lowered on ropes or rolled in from the "
    "sides. Below the floor there is often a room from which actors can rise through a door. The audience sees "
    "none of this work when it is done well.\n\n",
    "Paper\nPaper is made from plant fibres that are soaked in water and spread on a fine screen. The water runs "
    "off, and the fibres hold on to each other in a thin sheet. The sheet is pressed and dried, and sometimes "
    "covered with clay so that ink stays sharp. Used paper can be turned back into fibres several times before "
    "they become too short to hold together.\n\nGlacier\nA glacier is a mass of ice that forms where more snow "
    "falls than melts. Under its own weight the snow becomes ice, and the ice flows slowly down the valley. It "
    "carries stones that scratch the rock below it. Where the air is warm enough, the ice melts and leaves "
    "ridges of gravel behind. Streams of milky water run out from under its end.\n\nChoir\nA choir is a group of "
    "people who sing together, usually in several voices. High voices carry the melody in many pieces, and low "
    "voices give it a ground. A conductor keeps the time and shows when each voice begins. Choirs rehearse for "
    "weeks before a concert, first each voice by itself, then all of them at once.\n\n",
    "Lighthouse\nA lighthouse warns ships of rocks and shows the way to a harbour. Its lamp stands high so that "
    "it can be seen from far away, and lenses around it gather the light into a beam. Each lighthouse flashes in "
    "its own rhythm, by which sailors know where they are. Keepers once lived in the tower to tend the flame; "
    "today most lamps run by themselves.\n\nCompost\nCompost is what remains when leaves, peels and grass decay. "
    "Small animals and fungi eat the material and need air and water to do so, so the heap is turned from time "
    "to time. The middle of a large heap becomes quite warm. After some months the result is dark and crumbles "
    "in the hand. Gardeners dig it into the soil to feed their plants.\n\nWeaving\nCloth is woven by crossing "
    "two sets of threads. One set is stretched on a loom, and the other is passed over and under it, row by row. "
    "Patterns appear when threads of several colours are used, or when a thread skips some of the others. Hand "
    "looms are slow but can make pieces that no machine repeats. Strong cloth needs threads that are evenly "
    "spun.\n\n",
)
